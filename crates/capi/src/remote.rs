//! The store on other machines that the options of a limit name.

use crate::{MEMFOLD_ERROR_ARGUMENT, fail, memfold_options};
use ::memfold::{Password, RemoteOptions, StoreAddressError, show_remote_warnings};
use std::ffi::{CStr, c_char, c_int};
use std::time::Duration;

/// The store's options, if an address is given.
///
/// # Safety
/// The strings are null or end with a zero byte.
pub(crate) unsafe fn store(options: &memfold_options) -> Result<Option<RemoteOptions>, c_int> {
    // SAFETY: the caller's promise.
    let text = |name, text| unsafe { string(name, text) };
    let Some(address) = text("remote", options.remote)? else {
        return Ok(None);
    };
    let address = address.parse().map_err(|error: StoreAddressError| {
        fail(
            MEMFOLD_ERROR_ARGUMENT,
            &format!("options.remote {address:?}: {error}"),
        )
    })?;
    let mut store = RemoteOptions::new(address);
    store.user = text("remote_user", options.remote_user)?;
    store.password = text("remote_password", options.remote_password)?.map(Password::new);
    store.ca_certificates =
        text("remote_ca_certificates", options.remote_ca_certificates)?.map(String::into_bytes);
    store.replicas = options.remote_replicas;
    if options.remote_timeout_seconds != 0 {
        store.patience = Duration::from_secs(options.remote_timeout_seconds.into());
    }
    if options.remote_time_to_live_seconds != 0 {
        store.time_to_live = Duration::from_secs(options.remote_time_to_live_seconds);
    }
    show_remote_warnings();
    Ok(Some(store))
}

/// A string that may be left out.
///
/// # Safety
/// It is null or ends with a zero byte.
unsafe fn string(name: &str, text: *const c_char) -> Result<Option<String>, c_int> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    match unsafe { CStr::from_ptr(text) }.to_str() {
        Ok(text) => Ok(Some(text.to_owned())),
        Err(_) => Err(fail(
            MEMFOLD_ERROR_ARGUMENT,
            &format!("options.{name} is not UTF-8"),
        )),
    }
}
