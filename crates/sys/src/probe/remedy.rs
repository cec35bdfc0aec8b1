//! What gives a place the right that it lacks, in its own words.

use super::move_bugs::version_of;
use super::place::Place;
use super::read_line;
use crate::Errno;
use std::fs;
use std::os::unix::fs::MetadataExt;

const DEVICE: &str = "/dev/userfaultfd";
/// Of `/dev/userfaultfd`, but for distributions that brought it to an older one.
const FIRST_WITH_DEVICE: (u32, u32, u32) = (6, 1, 0);
const RECIPES: &str = "(docs/containers.md)";
const UNTIL_BOOT: &str = "(until the next boot)";
const FOR_ALL_USERS: &str = "sudo sysctl -w vm.unprivileged_userfaultfd=1";
const OF_USER: &str =
    "sudo chgrp \"$(id -gn)\" /dev/userfaultfd && sudo chmod g+rw /dev/userfaultfd";

/// What who grants the right should know of it.
pub(super) const BEFORE_GRANTING: &str = "Before you grant it: it lets a user stop the kernel at page faults on memory of \
     their own for as long as they like, which exploits use to win races in the kernel. Grant it to those who need it";

/// What makes `/dev/userfaultfd` open, which now fails with `error`; or what takes its place in kernels without it.
pub(super) fn device_remedy(place: Place, error: Errno) -> String {
    let found = fs::metadata(DEVICE).ok();
    let device = found.map(|found| Device {
        group: found.gid(),
        mode: found.mode(),
        is_unmapped: found.uid() == overflow_user() && is_in_user_namespace(),
    });
    let misc = fs::read_to_string("/proc/misc").unwrap_or_default();
    let release = read_line("/proc/sys/kernel/osrelease").unwrap_or_default();
    if device.is_none() && !has_device(&misc, &release) {
        return without_device(place);
    }
    remedy(place, error, device)
}

/// What gives memfold the capability `CAP_SYS_PTRACE`.
pub(super) fn ptrace_remedy(place: Place) -> String {
    const AS_ROOT: &str = "as root of a container that is not rootless";
    const BY_FILE: &str = "sudo setcap cap_sys_ptrace=ep \"$(command -v memfold)\"";
    match place {
        Place::Host | Place::GitHub => BY_FILE.to_owned(),
        Place::GitLab | Place::Slurm | Place::Batch => {
            format!("ask the administrator of the machine for: {BY_FILE}")
        }
        Place::Apptainer => format!(
            "ask the administrator of the machine for: {BY_FILE}, and run it on the host {RECIPES}"
        ),
        Place::Kubernetes => {
            format!(
                "in the container's securityContext: capabilities: {{ add: [SYS_PTRACE] }}, and runAsUser: 0 {RECIPES}"
            )
        }
        Place::Docker | Place::Podman | Place::Container => {
            let option = with_option(place, "--cap-add SYS_PTRACE");
            format!("{AS_ROOT}: {option} {RECIPES}")
        }
        Place::GitHubContainer => format!(
            "in the workflow, at the job's container: options: --cap-add SYS_PTRACE --user 0 {RECIPES}"
        ),
        Place::GitLabContainer => format!(
            "in the runner's config.toml, under [runners.docker]: cap_add = [\"SYS_PTRACE\"], and an image whose user is root \
             {RECIPES}"
        ),
    }
}

/// Whether a kernel has the device, whatever of it is in this `/dev`: by its list of devices, and by its release.
fn has_device(misc: &str, release: &str) -> bool {
    let mut names = misc
        .lines()
        .filter_map(|line| line.split_ascii_whitespace().nth(1));
    names.any(|name| name == "userfaultfd")
        || version_of(release).is_none_or(|version| version >= FIRST_WITH_DEVICE)
}

/// The system call is all that older kernels have. Programs need the right as well as memfold, so a file capability of
/// memfold's is not enough.
fn without_device(place: Place) -> String {
    const OLDER: &str = "Linux before 6.1 has no /dev/userfaultfd";
    match place {
        Place::Host | Place::GitHub => format!(
            "{OLDER}: sudo memfold run …, or for all users {FOR_ALL_USERS}   (until the next boot; in /etc/sysctl.d to \
             keep it)"
        ),
        Place::GitLab | Place::Slurm | Place::Batch | Place::Apptainer => format!(
            "{OLDER}: ask the administrator of the machine for vm.unprivileged_userfaultfd=1 in /etc/sysctl.d, or for Linux \
             6.1 {RECIPES}"
        ),
        Place::Kubernetes => format!(
            "{OLDER}: vm.unprivileged_userfaultfd=1 in /etc/sysctl.d of the nodes, and a seccompProfile of type Localhost that \
             allows the system call userfaultfd {RECIPES}"
        ),
        Place::Docker
        | Place::Podman
        | Place::Container
        | Place::GitHubContainer
        | Place::GitLabContainer => format!(
            "{OLDER}: start the container with a seccomp profile that allows the system call userfaultfd \
             (--security-opt seccomp=PROFILE), and {FOR_ALL_USERS} on the host   (until the next boot), or, as root of a \
             container that is not rootless, --cap-add SYS_PTRACE {RECIPES}"
        ),
    }
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

impl Device {
    /// The group that may open it, if it is not root's and has a number here.
    fn of_group(self) -> Option<u32> {
        let is_known = !self.is_unmapped && self.group != 0;
        (is_known && self.mode & 0o060 == 0o060).then_some(self.group)
    }
}

fn remedy(place: Place, error: Errno, device: Option<Device>) -> String {
    // What fails with it is the cgroup, though the folder has the device.
    let device_allowed = device.filter(|_| error != Errno(libc::EPERM));
    match place {
        Place::Host => on_host(error, device),
        Place::GitHub => {
            format!(
                "in a step before: sudo chown \"$(id -u)\" {DEVICE}, or sudo memfold run … {RECIPES}"
            )
        }
        Place::GitLab => by_administrator("runner", error, device),
        Place::Slurm | Place::Batch => by_administrator("compute nodes", error, device),
        Place::Apptainer => match device {
            None => format!("apptainer exec --bind {DEVICE} … {RECIPES}"),
            Some(_) => by_administrator("machine", error, device),
        },
        Place::Kubernetes => in_pod(device_allowed),
        Place::GitHubContainer => {
            let more = device_allowed.map_or("", |_| " --user 0");
            format!(
                "in the workflow, at the job's container: options: --device {DEVICE}{more} {RECIPES}"
            )
        }
        Place::GitLabContainer => {
            let more = device_allowed.map_or("", |_| ", and an image whose user is root");
            format!(
                "in the runner's config.toml, under [runners.docker]: devices = [\"{DEVICE}\"]{more} {RECIPES}"
            )
        }
        Place::Docker | Place::Podman | Place::Container => in_container(place, device_allowed),
    }
}

fn on_host(error: Errno, device: Option<Device>) -> String {
    let Some(device) = device else {
        return format!(
            "{FOR_ALL_USERS}   (until the next boot; in /etc/sysctl.d to keep it); in a service of systemd: PrivateDevices=no; \
             in a container: docker run --device {DEVICE} … (docs/containers.md has others)"
        );
    };
    if error == Errno(libc::EPERM) {
        return format!(
            "a control group forbids this process the device: in a service of systemd, DeviceAllow={DEVICE} rw (or \
             DevicePolicy=auto); in a container, docker run --device {DEVICE} … (docs/containers.md has others)"
        );
    }
    if device.is_unmapped {
        return format!(
            "let the user that made this user namespace open the device, outside: {OF_USER}   {UNTIL_BOOT} {RECIPES}"
        );
    }
    match device.of_group() {
        Some(group) => format!("{}, then log in again", joining(group)),
        None => format!(
            "{OF_USER}   (until the next boot; or for all users: {FOR_ALL_USERS}, and the same in /etc/sysctl.d to keep it)"
        ),
    }
}

/// Where a user has no `sudo`.
fn by_administrator(of: &str, error: Errno, device: Option<Device>) -> String {
    if error == Errno(libc::EPERM) {
        return format!(
            "ask the administrator of the {of} to allow jobs the device {DEVICE}, which their control group forbids {RECIPES}"
        );
    }
    match device.and_then(Device::of_group) {
        Some(group) => format!(
            "ask the administrator of the {of} for: {} {RECIPES}",
            joining(group)
        ),
        None => format!(
            "ask the administrator of the {of} to install memfold's package there, or the udev rule KERNEL==\"userfaultfd\", \
             GROUP=\"memfold\", MODE=\"0660\", and for: sudo usermod -aG memfold \"$USER\" {RECIPES}"
        ),
    }
}

fn in_pod(device: Option<Device>) -> String {
    let Some(device) = device else {
        return format!(
            "start the container with the device: a device plug-in, and a limit of the container that asks for it {RECIPES}"
        );
    };
    const OTHERWISE: &str =
        "or device_ownership_from_security_context = true in the nodes' containerd";
    match device.of_group() {
        Some(group) => format!(
            "the device has the node's owner and mode: in the pod's securityContext, supplementalGroups: [{group}]; {OTHERWISE} \
             {RECIPES}"
        ),
        None => format!(
            "the device has the node's owner and mode: give it to a group on the nodes, as memfold's packages do, and in the \
             pod's securityContext supplementalGroups: [GID]; {OTHERWISE} {RECIPES}"
        ),
    }
}

/// What gives a user a folder for runs, where none can hold them.
pub(super) fn folder_remedy(place: Place, is_root: bool) -> String {
    let (folder, tmpfs, mode) = if is_root {
        (
            "set TMPDIR to a folder that only root can write to, all users can search, and that is not mounted noexec",
            "--tmpfs /run:exec,mode=755",
            "755",
        )
    } else {
        (
            "set TMPDIR to a folder of your own that no other user can write to, with a short path without spaces, and \
             not mounted noexec",
            "--tmpfs /tmp:exec",
            "700",
        )
    };
    let here = match place {
        Place::Kubernetes => format!(
            "as an emptyDir can be written by all users: have an init container of the same user make one in it, by \
             mkdir -p -m {mode}, and mount that one by subPath {RECIPES}"
        ),
        Place::Docker | Place::Podman | Place::Container => {
            format!("for instance by {} {RECIPES}", with_option(place, tmpfs))
        }
        Place::GitHubContainer => format!("for instance by options: {tmpfs} {RECIPES}"),
        _ => return folder.to_owned(),
    };
    format!("{folder}; {here}")
}

/// The option that starts a container with the device, in its engine's words.
fn with_device(place: Place, more: &str) -> String {
    with_option(place, &format!("--device {DEVICE}{more}"))
}

fn with_option(place: Place, option: &str) -> String {
    match place {
        Place::Podman => format!("podman run {option} …"),
        Place::Docker => format!("docker run {option} …"),
        _ => format!("the option {option}, or its engine's like"),
    }
}

fn in_container(place: Place, device: Option<Device>) -> String {
    const OF_GROUP: &str =
        "sudo chgrp memfold /dev/userfaultfd && sudo chmod g+rw /dev/userfaultfd";
    const BY_GROUP: &str = " --group-add \"$(stat -c %g /dev/userfaultfd)\"";
    let Some(device) = device else {
        return format!(
            "start the container with the device: {} {RECIPES}",
            with_device(place, "")
        );
    };
    if device.is_unmapped && place == Place::Podman {
        return format!(
            "on the host: {OF_USER}   {UNTIL_BOOT}; then {} {RECIPES}",
            with_device(place, " --group-add keep-groups")
        );
    }
    if device.is_unmapped {
        return format!(
            "let the host's user open the device, on the host: {OF_USER}   {UNTIL_BOOT} {RECIPES}"
        );
    }
    match device.of_group() {
        Some(group) => format!(
            "start the container with the device's group: {} {RECIPES}",
            with_device(place, &format!(" --group-add {group}"))
        ),
        None => format!(
            "on the host: sudo groupadd -f memfold && {OF_GROUP}   (until the next boot; memfold's packages do it), then {}; \
             or run chmod 666 {DEVICE} as root in this container, which has a device of its own {RECIPES}",
            with_device(place, BY_GROUP)
        ),
    }
}

/// The command that makes the user a member of a group, by name where the group has one here.
fn joining(group: u32) -> String {
    let groups = fs::read_to_string("/etc/group").unwrap_or_default();
    let name = name_of(group, &groups).map_or_else(|| group.to_string(), str::to_owned);
    format!("sudo usermod -aG {name} \"$USER\"")
}

fn name_of(group: u32, groups: &str) -> Option<&str> {
    groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(group)).then_some(name)
    })
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
    const EPERM: Errno = Errno(libc::EPERM);
    const ENOENT: Errno = Errno(libc::ENOENT);
    const ROOTS: Device = Device {
        group: 0,
        mode: 0o600,
        is_unmapped: false,
    };
    const OF_GROUP: Device = Device {
        group: 4_000_711,
        mode: 0o660,
        ..ROOTS
    };

    #[test]
    fn a_remedy_names_the_engine_and_what_it_lacks() {
        let without = remedy(Place::Podman, ENOENT, None);
        assert!(without.contains("podman run --device /dev/userfaultfd …"));
        let filtered = remedy(Place::Docker, EPERM, Some(ROOTS));
        assert!(filtered.contains("docker run --device /dev/userfaultfd …"));
        let of_group = remedy(Place::Docker, EACCES, Some(OF_GROUP));
        assert!(of_group.contains("docker run --device /dev/userfaultfd --group-add 4000711 …"));
        let rootless = Device {
            is_unmapped: true,
            ..ROOTS
        };
        let rootless = remedy(Place::Podman, EACCES, Some(rootless));
        assert!(rootless.contains("--group-add keep-groups"));
        let roots = remedy(Place::Docker, EACCES, Some(ROOTS));
        assert!(roots.starts_with("on the host: ") && roots.contains("chmod 666"));
    }

    #[test]
    fn on_a_host_the_devices_group_is_joined_and_not_replaced() {
        let roots = remedy(Place::Host, EACCES, Some(ROOTS));
        assert!(roots.starts_with("sudo chgrp") && !roots.contains("docker"));
        let packaged = remedy(Place::Host, EACCES, Some(OF_GROUP));
        assert!(packaged.starts_with("sudo usermod -aG 4000711 \"$USER\", then log in again"));
        assert!(!packaged.contains("chgrp"), "{packaged}");
        let read_only = Device {
            mode: 0o640,
            ..OF_GROUP
        };
        assert!(remedy(Place::Host, EACCES, Some(read_only)).starts_with("sudo chgrp"));
        let forbidden = remedy(Place::Host, EPERM, Some(OF_GROUP));
        assert!(forbidden.contains("control group") && forbidden.contains("DeviceAllow="));
        assert_eq!(name_of(7, "a:x:17:\nmemfold:x:7:u\n"), Some("memfold"));
        assert_eq!(name_of(8, "a:x:17:\nbroken\n"), None);
    }

    #[test]
    fn jobs_are_told_their_own_recipe() {
        let github = remedy(Place::GitHub, EACCES, Some(ROOTS));
        assert!(github.contains("sudo chown \"$(id -u)\" /dev/userfaultfd"));
        let job = remedy(Place::GitHubContainer, ENOENT, None);
        assert!(job.contains("options: --device /dev/userfaultfd (docs"));
        let gitlab = remedy(Place::GitLabContainer, ENOENT, None);
        assert!(gitlab.contains("devices = [\"/dev/userfaultfd\"] (docs"));
        let image = remedy(Place::Apptainer, ENOENT, None);
        assert!(image.starts_with("apptainer exec --bind /dev/userfaultfd …"));
        for place in [Place::Slurm, Place::Batch, Place::Apptainer, Place::GitLab] {
            let rule = remedy(place, EACCES, Some(ROOTS));
            assert!(rule.starts_with("ask the administrator") && rule.contains("MODE=\"0660\""));
            let joined = remedy(place, EACCES, Some(OF_GROUP));
            assert!(joined.starts_with("ask the administrator") && joined.contains("usermod"));
            assert!(!joined.contains("MODE="), "{joined}");
            assert!(remedy(place, EPERM, Some(ROOTS)).contains("control group"));
        }
    }

    #[test]
    fn a_pod_that_may_not_open_the_device_is_told_of_groups() {
        let without = remedy(Place::Kubernetes, ENOENT, None);
        assert!(without.contains("device plug-in"));
        let of_group = remedy(Place::Kubernetes, EACCES, Some(OF_GROUP));
        assert!(of_group.contains("supplementalGroups: [4000711]"));
        let unmapped = Device {
            is_unmapped: true,
            ..OF_GROUP
        };
        for device in [ROOTS, unmapped] {
            let unknown = remedy(Place::Kubernetes, EACCES, Some(device));
            assert!(unknown.contains("supplementalGroups: [GID]"));
            assert!(unknown.contains("device_ownership_from_security_context"));
        }
    }

    #[test]
    fn a_file_capability_is_not_asked_of_who_is_in_a_container() {
        for (place, part) in [
            (Place::Host, "sudo setcap"),
            (Place::GitHub, "sudo setcap"),
            (Place::Slurm, "ask the administrator"),
            (Place::Apptainer, "on the host"),
            (Place::Docker, "docker run --cap-add SYS_PTRACE"),
            (Place::Podman, "podman run --cap-add SYS_PTRACE"),
            (Place::Container, "the option --cap-add SYS_PTRACE"),
            (Place::Kubernetes, "add: [SYS_PTRACE]"),
            (Place::GitHubContainer, "options: --cap-add SYS_PTRACE"),
            (Place::GitLabContainer, "cap_add = [\"SYS_PTRACE\"]"),
        ] {
            let text = ptrace_remedy(place);
            assert!(text.contains(part), "{text}");
            assert!(
                !(text.contains("setcap") && text.contains("SYS_PTRACE")),
                "{text}"
            );
        }
    }

    #[test]
    fn a_folder_is_asked_for_by_what_the_place_has() {
        for (place, part) in [
            (Place::Docker, "docker run --tmpfs /tmp:exec"),
            (Place::Podman, "podman run --tmpfs /tmp:exec"),
            (Place::Container, "the option --tmpfs /tmp:exec"),
            (Place::GitHubContainer, "options: --tmpfs /tmp:exec"),
            (
                Place::Kubernetes,
                "mkdir -p -m 700, and mount that one by subPath",
            ),
        ] {
            let text = folder_remedy(place, false);
            assert!(
                text.starts_with("set TMPDIR") && text.contains(part),
                "{text}"
            );
            assert_eq!(text.contains("--tmpfs"), place != Place::Kubernetes);
        }
        for place in [
            Place::Host,
            Place::Slurm,
            Place::Apptainer,
            Place::GitLabContainer,
        ] {
            assert!(!folder_remedy(place, false).contains("container"));
        }
        assert!(folder_remedy(Place::Kubernetes, true).contains("-m 755"));
        assert!(folder_remedy(Place::Docker, true).contains("--tmpfs /run:exec,mode=755"));
    }

    #[test]
    fn kernels_without_the_device_are_known() {
        let listed = "122 userfaultfd\n 10 fuse\n";
        assert!(has_device(listed, "5.14.0-427.el9.x86_64"));
        for (release, has) in [
            ("5.14.0", false),
            ("6.0.19", false),
            ("6.1.0-18", true),
            ("6.18.5", true),
        ] {
            assert_eq!(has_device(" 10 fuse\n", release), has, "{release}");
        }
        assert!(has_device("", "?"));
    }

    #[test]
    fn without_the_device_no_place_is_told_to_use_it() {
        for (place, part) in [
            (Place::Host, "sudo memfold run"),
            (Place::GitHub, "sudo memfold run"),
            (Place::Docker, "--security-opt seccomp=PROFILE"),
            (Place::Podman, "--cap-add SYS_PTRACE"),
            (Place::Container, "seccomp profile"),
            (Place::GitHubContainer, "seccomp profile"),
            (Place::GitLabContainer, "seccomp profile"),
            (Place::Kubernetes, "type Localhost"),
            (Place::GitLab, "ask the administrator"),
            (Place::Slurm, "ask the administrator"),
            (Place::Apptainer, "ask the administrator"),
        ] {
            let text = without_device(place);
            assert!(text.contains(part), "{text}");
            assert!(text.contains("vm.unprivileged_userfaultfd=1"), "{text}");
            assert!(
                !text.contains("--device") && !text.contains("chgrp"),
                "{text}"
            );
        }
    }
}
