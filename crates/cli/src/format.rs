//! Numbers and text formatted for people.

use memfold_sys::process::proc_text;

/// `81233` as `81,233`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Bytes in the largest binary unit that leaves a number of at least 1.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 || value >= 99.95 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// Nanoseconds in the unit that fits.
pub fn nanoseconds(nanoseconds: u64) -> String {
    let value = nanoseconds as f64;
    match nanoseconds {
        0..1_000 => format!("{nanoseconds} ns"),
        1_000..1_000_000 => format!("{:.*} µs", usize::from(nanoseconds < 10_000), value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", value / 1e6),
        _ => format!("{:.2} s", value / 1e9),
    }
}

/// A time of a person's concern: `3.2 s`, `0.05 s`, `2 min 5 s`.
pub fn duration(nanoseconds: u64) -> String {
    let seconds = nanoseconds as f64 / 1e9;
    match nanoseconds / 1_000_000_000 {
        0 => format!("{seconds:.2} s"),
        1..60 => format!("{seconds:.1} s"),
        whole => format!("{} min {} s", whole / 60, whole % 60),
    }
}

/// How many times smaller `stored` is than `original`: `2.2:1`, or `>999:1`.
pub fn ratio(original: u64, stored: u64) -> String {
    match original as f64 / stored as f64 {
        ratio if ratio > 999.0 => ">999:1".to_owned(),
        ratio => format!("{ratio:.1}:1"),
    }
}

/// The same, to follow a size; nothing while nothing is stored.
pub fn at_ratio(original: u64, stored: u64) -> String {
    if original == 0 || stored == 0 {
        return String::new();
    }
    format!(" at {}", ratio(original, stored))
}

/// Text of others, fit for a terminal and not too long.
pub fn shown(text: &str) -> String {
    const LONGEST: usize = 200;
    printable(text).chars().take(LONGEST).collect()
}

/// The name that a process gave itself, fit for a terminal; empty if it is gone.
pub fn name_of(pid: i32) -> String {
    let name = proc_text(&format!("/proc/{pid}/comm")).unwrap_or_default();
    printable(name.trim_end_matches('\n'))
}

/// Text without control characters and bidirectional overrides, which could steer a terminal.
pub fn printable(text: &str) -> String {
    let safe = |c: char| match c {
        '\n' | '\t' => ' ',
        c if c.is_control() => '?',
        '\u{200e}' | '\u{200f}' | '\u{61c}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
            '?'
        }
        c => c,
    };
    text.chars().map(safe).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_grouped() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(81_233), "81,233");
        assert_eq!(grouped(1_234_567), "1,234,567");
    }

    #[test]
    fn units_follow_the_size() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(4096), "4.0 KiB");
        assert_eq!(bytes(412 << 20), "412 MiB");
        assert_eq!(bytes(3 << 29), "1.5 GiB");
        assert_eq!(nanoseconds(950), "950 ns");
        assert_eq!(nanoseconds(2_600), "2.6 µs");
        assert_eq!(nanoseconds(31_234), "31 µs");
        assert_eq!(nanoseconds(1_500_000), "1.5 ms");
        assert_eq!(nanoseconds(2_000_000_000), "2.00 s");
        assert_eq!(duration(50_000_000), "0.05 s");
        assert_eq!(duration(3_210_000_000), "3.2 s");
        assert_eq!(duration(125_000_000_000), "2 min 5 s");
    }

    #[test]
    fn nothing_steers_a_terminal() {
        assert_eq!(printable("a\nb\u{1b}[2J\u{9b}31m\u{7f}"), "a b?[2J?31m?");
        assert_eq!(printable("\u{202e}gnp.exe ü"), "?gnp.exe ü");
    }

    #[test]
    fn a_ratio_needs_something_stored() {
        assert_eq!(at_ratio(0, 0), "");
        assert_eq!(at_ratio(4096, 0), "");
        assert_eq!(at_ratio(2200, 1000), " at 2.2:1");
        assert_eq!(at_ratio(1 << 40, 850_000), " at >999:1");
        assert_eq!(ratio(4096, 0), ">999:1");
    }
}
