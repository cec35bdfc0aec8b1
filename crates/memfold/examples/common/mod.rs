//! The arguments of the examples.

use std::process::exit;
use std::str::FromStr;

/// The values of options by their names, such as `--megabytes 64`; the defaults of those that are not given. Ends the
/// program at any other argument.
pub(crate) fn numbers<T: Copy + FromStr, const COUNT: usize>(
    options: [(&str, T); COUNT],
) -> [T; COUNT] {
    let mut values = options.map(|(_, default)| default);
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let option = options.iter().position(|(known, _)| *known == name);
        let value = arguments.next().and_then(|value| value.parse().ok());
        let (Some(option), Some(value)) = (option, value) else {
            let known = options.map(|(name, _)| format!("[{name} N]")).join(" ");
            eprintln!("{name} is no option with a number; use {known}");
            exit(2);
        };
        values[option] = value;
    }
    values
}
