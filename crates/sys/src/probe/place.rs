//! Whether this is a container, whose it is, and the command that gives it what it lacks.

use crate::Errno;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const DEVICE: &str = "/dev/userfaultfd";

/// What runs this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// No container that is known.
    Host,
    /// A container of Docker.
    Docker,
    /// A container of Podman.
    Podman,
    /// A pod of Kubernetes.
    Kubernetes,
    /// Another container.
    Container,
}

/// Found once; nothing of it changes while a process runs.
pub(super) fn place() -> Place {
    let container = std::env::var("container").ok();
    let is_there = |path: &str| Path::new(path).exists();
    let pod = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()
        || is_there("/var/run/secrets/kubernetes.io");
    place_by(is_there, container.as_deref(), pod)
}

fn place_by(is_there: impl Fn(&str) -> bool, container: Option<&str>, pod: bool) -> Place {
    // A pod may be made by Docker or with Podman's libraries: what asks for devices is Kubernetes then.
    if pod {
        Place::Kubernetes
    } else if is_there("/run/.containerenv") || container == Some("podman") {
        Place::Podman
    } else if is_there("/.dockerenv") {
        Place::Docker
    } else if container.is_some() {
        Place::Container
    } else {
        Place::Host
    }
}

impl Place {
    /// Its name for a message.
    pub(super) fn name(self) -> &'static str {
        match self {
            Place::Host => "no container that is known",
            Place::Docker => "a container of Docker",
            Place::Podman => "a container of Podman",
            Place::Kubernetes => "a pod of Kubernetes",
            Place::Container => "a container",
        }
    }

    /// The option that starts a container with the device, in its engine's words.
    fn with_device(self, more: &str) -> String {
        match self {
            Place::Docker | Place::Host => format!("docker run --device {DEVICE}{more} …"),
            Place::Podman => format!("podman run --device {DEVICE}{more} …"),
            Place::Container => format!("the option --device {DEVICE}{more}, or its engine's like"),
            Place::Kubernetes => {
                "a device plug-in, and a limit of the container that asks for it".to_owned()
            }
        }
    }
}

/// What makes `/dev/userfaultfd` open, which now fails with `error`.
pub(super) fn device_remedy(place: Place, error: Errno) -> String {
    let device = fs::metadata(DEVICE).ok();
    let device = device.map(|found| Device {
        group: found.gid(),
        mode: found.mode(),
        is_unmapped: found.uid() == overflow_user() && is_in_user_namespace(),
    });
    remedy(place, error, device)
}

/// The device as it is seen here.
#[derive(Debug, Clone, Copy)]
struct Device {
    group: u32,
    mode: u32,
    /// Its owner is a user that this user namespace does not have: as in rootless containers, to which the engine gives
    /// the host's own device.
    is_unmapped: bool,
}

fn remedy(place: Place, error: Errno, device: Option<Device>) -> String {
    const OF_USER: &str =
        "sudo chgrp \"$(id -gn)\" /dev/userfaultfd && sudo chmod g+rw /dev/userfaultfd";
    const OF_GROUP: &str =
        "sudo chgrp memfold /dev/userfaultfd && sudo chmod g+rw /dev/userfaultfd";
    const BY_GROUP: &str = " --group-add \"$(stat -c %g /dev/userfaultfd)\"";
    const ALL_USERS: &str = "or for all users: sudo sysctl -w vm.unprivileged_userfaultfd=1";
    let recipes = "(docs/containers.md)";
    match (place, device) {
        (Place::Host, None) => format!(
            "sudo sysctl -w vm.unprivileged_userfaultfd=1   (until the next boot; in /etc/sysctl.d to keep it); in a \
             container: {} (docs/containers.md has others)",
            place.with_device("")
        ),
        (Place::Host, Some(device)) if !device.is_unmapped && error != Errno(libc::EPERM) => {
            format!(
                "{OF_USER}   (until the next boot; {ALL_USERS}, and the same in /etc/sysctl.d to keep it)"
            )
        }
        // The cgroup of the container does not allow the device, though its folder has it.
        (_, None) | (Place::Kubernetes, _) => {
            format!(
                "start the container with the device: {} {recipes}",
                place.with_device("")
            )
        }
        (_, Some(_)) if error == Errno(libc::EPERM) => {
            format!(
                "start the container with the device: {} {recipes}",
                place.with_device("")
            )
        }
        (Place::Podman, Some(device)) if device.is_unmapped => format!(
            "on the host: {OF_USER}   (until the next boot); then {} {recipes}",
            place.with_device(" --group-add keep-groups")
        ),
        (_, Some(device)) if device.is_unmapped => format!(
            "let the host's user open the device, on the host: {OF_USER}   (until the next boot) {recipes}"
        ),
        // A group may, of which this user is no member.
        (_, Some(device)) if device.mode & 0o060 == 0o060 && device.group != 0 => format!(
            "start the container with the device's group: {} {recipes}",
            place.with_device(&format!(" --group-add {}", device.group))
        ),
        (_, Some(_)) => format!(
            "on the host: sudo groupadd -f memfold && {OF_GROUP}   (until the next boot; memfold's packages do it), then {}; \
             or run chmod 666 {DEVICE} as root in this container, which has a device of its own {recipes}",
            place.with_device(BY_GROUP)
        ),
    }
}

/// Whether this user namespace is another one than the host's first.
fn is_in_user_namespace() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    !map.split_ascii_whitespace().eq(["0", "0", "4294967295"])
}

/// What `stat` shows in place of users that a namespace does not have.
fn overflow_user() -> u32 {
    let text = fs::read_to_string("/proc/sys/kernel/overflowuid").unwrap_or_default();
    text.trim().parse().unwrap_or(65534)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EACCES: Errno = Errno(libc::EACCES);
    const ROOTS: Device = Device {
        group: 0,
        mode: 0o600,
        is_unmapped: false,
    };

    #[test]
    fn engines_are_told_apart() {
        let nothing = |_: &str| false;
        assert_eq!(place_by(nothing, None, false), Place::Host);
        assert_eq!(
            place_by(|path| path == "/.dockerenv", None, false),
            Place::Docker
        );
        assert_eq!(
            place_by(|path| path == "/run/.containerenv", None, false),
            Place::Podman
        );
        assert_eq!(place_by(nothing, Some("podman"), false), Place::Podman);
        assert_eq!(place_by(nothing, Some("lxc"), false), Place::Container);
        assert_eq!(
            place_by(|path| path == "/.dockerenv", None, true),
            Place::Kubernetes
        );
    }

    #[test]
    fn a_remedy_names_the_engine_and_what_it_lacks() {
        let without = remedy(Place::Podman, Errno(libc::ENOENT), None);
        assert!(without.contains("podman run --device /dev/userfaultfd …"));
        let filtered = remedy(Place::Docker, Errno(libc::EPERM), Some(ROOTS));
        assert!(filtered.contains("docker run --device /dev/userfaultfd …"));
        let group = Device {
            group: 4711,
            mode: 0o660,
            ..ROOTS
        };
        let of_group = remedy(Place::Docker, EACCES, Some(group));
        assert!(of_group.contains("docker run --device /dev/userfaultfd --group-add 4711 …"));
        let rootless = Device {
            is_unmapped: true,
            ..ROOTS
        };
        let rootless = remedy(Place::Podman, EACCES, Some(rootless));
        assert!(rootless.contains("--group-add keep-groups"));
        let roots = remedy(Place::Docker, EACCES, Some(ROOTS));
        assert!(roots.starts_with("on the host: ") && roots.contains("chmod 666"));
        let host = remedy(Place::Host, EACCES, Some(ROOTS));
        assert!(host.starts_with("sudo chgrp") && !host.contains("docker"));
    }
}
