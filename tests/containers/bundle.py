#!/usr/bin/env python3
"""Writes an OCI bundle in which one command runs as in a default container of Docker or Podman.

    bundle.py FOLDER --profile seccomp.json --rootfs ROOT [--user UID] [--group GID] [--memory BYTES] -- COMMAND...

The capabilities are the fourteen that Docker leaves by default, or none for another user than root; the seccomp
profile is the one given, as containers-common ships it; the only device beyond the usual ones is /dev/userfaultfd,
as by `docker run --device /dev/userfaultfd`, open to all, or to a group which the command's user is in besides, as in a
pod of Kubernetes. The root filesystem is read-only, with a /tmp and a /run of its own.
"""

import argparse
import json
import os
import pathlib

CAPABILITIES = [
    "CAP_" + name
    for name in (
        "AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID KILL MKNOD NET_BIND_SERVICE NET_RAW SETFCAP SETGID SETPCAP "
        "SETUID SYS_CHROOT"
    ).split()
]
USERFAULTFD = "/dev/userfaultfd"


def applies(rule, capabilities):
    """Whether a rule of the profile is for these capabilities, this architecture and a new kernel."""
    included, excluded = rule.get("includes", {}), rule.get("excludes", {})
    if "x86_64" in excluded.get("arches", []) or "amd64" in excluded.get("arches", []):
        return False
    arches = included.get("arches")
    if arches and not {"amd64", "x86_64"} & set(arches):
        return False
    if any(capability in capabilities for capability in excluded.get("caps", [])):
        return False
    return all(capability in capabilities for capability in included.get("caps", []))


def seccomp(profile, capabilities):
    rules = []
    for rule in json.loads(pathlib.Path(profile).read_text())["syscalls"]:
        if not applies(rule, capabilities):
            continue
        known = {key: rule[key] for key in ("names", "action", "args", "errnoRet") if rule.get(key)}
        rules.append(known)
    text = json.loads(pathlib.Path(profile).read_text())
    return {
        "defaultAction": text["defaultAction"],
        "defaultErrnoRet": text.get("defaultErrnoRet", 1),
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"],
        "syscalls": rules,
    }


def mount(destination, kind, options):
    source = {"tmpfs": "tmpfs", "proc": "proc", "devpts": "devpts", "sysfs": "sysfs"}[kind]
    return {"destination": destination, "type": kind, "source": source, "options": options}


def namespaces():
    """A container has one of cgroups where they are of version 2."""
    kinds = ["pid", "ipc", "uts", "mount", "network"]
    if os.path.exists("/sys/fs/cgroup/cgroup.controllers"):
        kinds.append("cgroup")
    return [{"type": kind} for kind in kinds]


def bundle(options):
    device = os.stat(USERFAULTFD)
    capabilities = CAPABILITIES if options.user == 0 else []
    resources = {"devices": [{"allow": True, "access": "rwm"}]}
    if options.memory:
        resources["memory"] = {"limit": options.memory}
    return {
        "ociVersion": "1.0.0",
        "process": {
            "terminal": False,
            "user": {
                "uid": options.user,
                "gid": options.user,
                "additionalGids": [options.group] if options.group else [],
            },
            "args": options.command,
            "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/tmp"],
            "cwd": "/",
            "capabilities": {kind: capabilities for kind in ("bounding", "effective", "permitted")},
            "noNewPrivileges": True,
        },
        "root": {"path": options.rootfs, "readonly": True},
        "hostname": "container",
        "mounts": [
            mount("/proc", "proc", ["nosuid", "noexec", "nodev"]),
            mount("/dev", "tmpfs", ["nosuid", "mode=755"]),
            mount("/dev/pts", "devpts", ["nosuid", "noexec", "newinstance", "ptmxmode=0666"]),
            mount("/dev/shm", "tmpfs", ["nosuid", "noexec", "nodev", "mode=1777"]),
            mount("/sys", "sysfs", ["nosuid", "noexec", "nodev", "ro"]),
            {
                "destination": "/sys/fs/cgroup",
                "type": "cgroup",
                "source": "cgroup",
                "options": ["nosuid", "noexec", "nodev", "relatime", "ro"],
            },
            mount("/tmp", "tmpfs", ["nosuid", "nodev", "mode=1777"]),
            mount("/run", "tmpfs", ["nosuid", "nodev", "mode=755"]),
        ],
        "linux": {
            "namespaces": namespaces(),
            "devices": [
                {
                    "path": USERFAULTFD,
                    "type": "c",
                    "major": os.major(device.st_rdev),
                    "minor": os.minor(device.st_rdev),
                    "fileMode": 0o660 if options.group else 0o666,
                    "uid": 0,
                    "gid": options.group or 0,
                }
            ],
            "resources": resources,
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys"],
            "seccomp": seccomp(options.profile, capabilities),
        },
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--rootfs", required=True)
    parser.add_argument("--user", type=int, default=0)
    parser.add_argument("--group", type=int)
    parser.add_argument("--memory", type=int)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    (options.folder / "config.json").write_text(json.dumps(bundle(options), indent=1))


main()
