//! The store on other machines that the options name.

use crate::failure::Failure;
use clap::Args;
use memfold_remote::{OpenError, Options, Password, RemoteStore, StoreAddress};
use memfold_sys::inherited;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Variables that hold what authenticates. No program gets them.
pub const SECRETS: [&str; 2] = [USER, PASSWORD];

const USER: &str = "MEMFOLD_REMOTE_USER";
const PASSWORD: &str = "MEMFOLD_REMOTE_PASSWORD";
/// No password and no set of certificates is longer.
const LONGEST_FILE: u64 = 1 << 20;

/// Options of a store. User and password are not among them: other users can read a command line.
#[derive(Debug, Args)]
pub struct RemoteArguments {
    /// Send pages (a disk's blocks) that fit neither into memory nor into the swap file to Valkey or Redis, encrypted:
    /// `valkey://HOST[:PORT][,HOST[:PORT]…]`, or `valkeys://` for TLS; any node of a cluster leads to all
    #[arg(long, value_name = "ADDRESS", env = "MEMFOLD_REMOTE")]
    #[arg(value_hint = clap::ValueHint::Url)]
    pub remote: Option<StoreAddress>,
    /// Read the store's password from FILE (two lines: user, password) [default: the variables
    /// `MEMFOLD_REMOTE_USER` and `MEMFOLD_REMOTE_PASSWORD`]
    #[arg(long, value_name = "FILE", env = "MEMFOLD_REMOTE_PASSWORD_FILE")]
    #[arg(requires = "remote", value_hint = clap::ValueHint::FilePath)]
    pub remote_password_file: Option<PathBuf>,
    /// Check the servers of `valkeys://` against the authorities in FILE (PEM) [default: the host's]
    #[arg(long, value_name = "FILE", env = "MEMFOLD_REMOTE_CA_FILE")]
    #[arg(requires = "remote", value_hint = clap::ValueHint::FilePath)]
    pub remote_ca_file: Option<PathBuf>,
    /// Take a page for stored once N replicas have it, too; 16 at most
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        env = "MEMFOLD_REMOTE_REPLICAS"
    )]
    #[arg(value_parser = clap::value_parser!(u32).range(0..=16))]
    pub remote_replicas: u32,
    /// Keep a copy of each remote page in the swap file (--swap-file), and read that where the store fails
    #[arg(long, env = "MEMFOLD_REMOTE_KEEP_COPY")]
    #[arg(requires = "remote", value_parser = clap::builder::FalseyValueParser::new())]
    pub remote_keep_copy: bool,
    /// Kill a program (on a disk: fail the read) that waits this long for a remote page; 1s to 31days
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "1m",
        env = "MEMFOLD_REMOTE_TIMEOUT"
    )]
    #[arg(value_parser = time)]
    pub remote_timeout: Duration,
    /// Have the store forget pages that memfold did not renew for this long: after a crash, or a cut as
    /// long; at least twice --remote-timeout, and 10s; at most 31days
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "1h",
        env = "MEMFOLD_REMOTE_TTL"
    )]
    #[arg(value_parser = time)]
    pub remote_ttl: Duration,
}

/// A time from a second to a month.
fn time(text: &str) -> Result<Duration, String> {
    const LONGEST: Duration = Duration::from_secs(31 * 24 * 3600);
    let time = humantime::parse_duration(text)
        .map_err(|error| format!("{error}; give a time such as 90s, 10m or 1h"))?;
    if (Duration::from_secs(1)..=LONGEST).contains(&time) {
        Ok(time)
    } else {
        Err("give a time from 1s to 31days".to_owned())
    }
}

/// Opens the store, if the options name one. To be called after the messages are shown.
pub fn open(arguments: &RemoteArguments) -> Result<Option<RemoteStore>, Failure> {
    let Some(address) = &arguments.remote else {
        return Ok(None);
    };
    let mut options = Options::new(address.clone());
    (options.user, options.password) = credentials(arguments.remote_password_file.as_deref())?;
    if let Some(path) = &arguments.remote_ca_file {
        options.ca_certificates = Some(read("--remote-ca-file", path)?.into_bytes());
    }
    options.replicas = arguments.remote_replicas;
    options.time_to_live = arguments.remote_ttl;
    options.patience = arguments.remote_timeout;
    let store = RemoteStore::open(&options).map_err(|error| unusable(&error))?;
    Ok(Some(store))
}

/// What is wrong with a store, and which option to change.
fn unusable(error: &OpenError) -> Failure {
    let remedy = match error {
        OpenError::Refused { .. } => {
            "; give the right ones by --remote-password-file, or MEMFOLD_REMOTE_USER and MEMFOLD_REMOTE_PASSWORD"
        }
        OpenError::NoPassword { .. } => {
            "; give both by --remote-password-file, or MEMFOLD_REMOTE_USER and MEMFOLD_REMOTE_PASSWORD"
        }
        OpenError::Authorities { .. } => " by --remote-ca-file",
        OpenError::TooFewReplicas { .. } => {
            "; give a smaller --remote-replicas, or the server more replicas"
        }
        OpenError::TimeToLive => ": change --remote-ttl or --remote-timeout",
        _ => "",
    };
    Failure::own(format!("{error}{remedy}"))
}

/// The user and the password: from the file, or else from the variables.
fn credentials(file: Option<&Path>) -> Result<(Option<String>, Option<Password>), Failure> {
    let text = |name: &str| {
        let not_text = |_| Failure::own(format!("{name} is not UTF-8"));
        let value: Option<OsString> = inherited::variable(name);
        value
            .map(OsString::into_string)
            .transpose()
            .map_err(not_text)
    };
    let user = text(USER)?.filter(|user| !user.is_empty());
    let Some(path) = file else {
        let password = text(PASSWORD)?.filter(|password| !password.is_empty());
        return Ok((user, password.map(Password::new)));
    };
    let content = read("--remote-password-file", path)?;
    let lines: Vec<&str> = content.lines().collect();
    match lines[..] {
        [password] => Ok((user, Some(Password::new(password.to_owned())))),
        [user, password] => Ok((
            Some(user.to_owned()),
            Some(Password::new(password.to_owned())),
        )),
        _ => Err(Failure::own(format!(
            "--remote-password-file {}: it must hold the password, or the user and the password in two \
             lines",
            path.display()
        ))),
    }
}

fn read(option: &str, path: &Path) -> Result<String, Failure> {
    let failed = |error: std::io::Error| {
        Failure::own(format!("cannot read {option} {}: {error}", path.display()))
    };
    let length = fs::metadata(path).map_err(failed)?.len();
    if length > LONGEST_FILE {
        return Err(Failure::own(format!(
            "{option} {}: it is longer than 1 MiB",
            path.display()
        )));
    }
    fs::read_to_string(path).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_passwords_come_from_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("password");
        let found = |content: &str| {
            fs::write(&path, content).unwrap();
            credentials(Some(&path)).map(|(user, password)| (user, password.is_some()))
        };
        assert_eq!(found("secret\n").unwrap(), (None, true));
        let with_user = (Some("me".to_owned()), true);
        assert_eq!(found("me\nsecret").unwrap(), with_user);
        assert!(found("").is_err() && found("a\nb\nc").is_err());
        let missing = credentials(Some(&folder.path().join("none"))).unwrap_err();
        assert!(missing.to_string().contains("none"), "{missing}");
    }

    #[test]
    fn times_are_neither_nothing_nor_years() {
        assert_eq!(time("90s"), Ok(Duration::from_secs(90)));
        assert!(time("0s").is_err() && time("1y").is_err() && time("soon").is_err());
    }
}
