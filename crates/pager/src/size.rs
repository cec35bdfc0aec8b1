//! Sizes as users write them: the one parser of the command line, the library and Python.

use std::fmt;
use std::str::FromStr;

/// A size: bytes, or a percentage of what the host or the enclosing cgroup allows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Size {
    /// Bytes.
    Bytes(u64),
    /// Hundredths of the allowance; above 0, at most 100.
    Percent(f64),
}

/// Why a size was not understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SizeError {
    /// Not a number with an optional suffix.
    Form,
    /// More bytes than 64 bits count.
    TooLarge,
    /// A percentage of nothing or of more than everything.
    Percentage,
}

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SizeError::Form => {
                "a size is a number with K, M, G or T (1024s; KB, KiB and Ki are the same), or a percentage, \
                 such as 512M, 1.5G or 50%"
            }
            SizeError::TooLarge => "more bytes than any machine has",
            SizeError::Percentage => "a percentage lies between 0 and 100",
        })
    }
}

impl std::error::Error for SizeError {}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Size, SizeError> {
        let text = text.trim();
        let digits = text
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(text.len());
        let (number, suffix) = text.split_at(digits);
        let suffix = suffix.trim_start();
        if suffix == "%" {
            let percent: f64 = number.parse().map_err(|_| SizeError::Form)?;
            return if percent > 0.0 && percent <= 100.0 {
                Ok(Size::Percent(percent))
            } else {
                Err(SizeError::Percentage)
            };
        }
        let unit: u64 = match suffix.to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kb" | "ki" | "kib" => 1 << 10,
            "m" | "mb" | "mi" | "mib" => 1 << 20,
            "g" | "gb" | "gi" | "gib" => 1 << 30,
            "t" | "tb" | "ti" | "tib" => 1 << 40,
            _ => return Err(SizeError::Form),
        };
        scale(number, unit).map(Size::Bytes)
    }
}

/// `number` (digits with at most one point) times `unit`, rounded down.
fn scale(number: &str, unit: u64) -> Result<u64, SizeError> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if (whole.is_empty() && fraction.is_empty()) || !digits(whole) || !digits(fraction) {
        return Err(SizeError::Form);
    }
    let whole: u64 = if whole.is_empty() { 0 } else { parse(whole)? };
    // Nine decimals are finer than a byte of a gigabyte.
    let fraction = &fraction[..fraction.len().min(9)];
    let part = if fraction.is_empty() {
        0
    } else {
        let parts = u128::from(parse(fraction)?) * u128::from(unit);
        (parts / 10_u128.pow(fraction.len() as u32)) as u64
    };
    let bytes = whole
        .checked_mul(unit)
        .and_then(|bytes| bytes.checked_add(part));
    bytes.ok_or(SizeError::TooLarge)
}

/// Parses digits; the only way to fail is that there are too many.
fn parse(digits: &str) -> Result<u64, SizeError> {
    digits.parse().map_err(|_| SizeError::TooLarge)
}

impl Size {
    /// The size in bytes, where a percentage is of what the host and the enclosing cgroups allow.
    ///
    /// # Errors
    /// If that cannot be read.
    #[cfg(not(simulated))]
    pub fn bytes(self) -> std::io::Result<u64> {
        Ok(match self {
            Size::Bytes(bytes) => bytes,
            Size::Percent(_) => self.bytes_of(memfold_sys::probe::memory_allowance()?.bytes),
        })
    }

    /// The size in bytes, where a percentage is of `allowance` bytes.
    pub fn bytes_of(self, allowance: u64) -> u64 {
        match self {
            Size::Bytes(bytes) => bytes,
            Size::Percent(percent) => (allowance as f64 * percent / 100.0) as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> u64 {
        match text.parse() {
            Ok(Size::Bytes(bytes)) => bytes,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn units_are_of_1024() {
        assert_eq!(bytes("1073741824"), 1 << 30);
        assert_eq!(bytes("16K"), 16 << 10);
        assert_eq!(bytes("200m"), 200 << 20);
        assert_eq!(bytes("2G"), 2 << 30);
        assert_eq!(bytes("1T"), 1 << 40);
        assert_eq!(bytes("64MiB"), 64 << 20);
        assert_eq!(bytes("2GB"), 2 << 30);
        assert_eq!(bytes("200MB"), 200 << 20);
        assert_eq!(bytes("2Gi"), 2 << 30);
        assert_eq!(bytes("2g"), 2 << 30);
        assert_eq!(bytes("1.5G"), 3 << 29);
        assert_eq!(bytes(".5M"), 1 << 19);
        assert_eq!(bytes(" 7 K "), 7 << 10);
    }

    #[test]
    fn percentages_are_of_the_allowance() {
        let half: Size = "50%".parse().unwrap();
        assert_eq!(half.bytes_of(1 << 30), 1 << 29);
        assert_eq!("12.5%".parse::<Size>().unwrap().bytes_of(800), 100);
        assert_eq!(Size::Bytes(7).bytes_of(1 << 30), 7);
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "", "G", "x", "12Q", "1.2.3M", "-5M", "5MiBs", "1e3", "%", ".", "0x10", "１M",
        ] {
            assert_eq!(text.parse::<Size>(), Err(SizeError::Form), "{text:?}");
        }
        for text in ["0%", "101%", "0.0%"] {
            assert_eq!(text.parse::<Size>(), Err(SizeError::Percentage), "{text:?}");
        }
        for text in ["99999999999999999999", "18446744073709551615K", "20000000T"] {
            assert_eq!(text.parse::<Size>(), Err(SizeError::TooLarge), "{text:?}");
        }
    }
}
