//! Whether this is a container or the job of a runner or of a cluster, and whose.

use std::fs;
use std::path::Path;

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
    /// A container of Apptainer or Singularity.
    Apptainer,
    /// Another container.
    Container,
    /// A job of GitHub Actions, on its runner itself.
    GitHub,
    /// The container of such a job.
    GitHubContainer,
    /// A job of GitLab CI, on its runner itself.
    GitLab,
    /// The container of such a job.
    GitLabContainer,
    /// A job of Slurm.
    Slurm,
    /// A job of PBS, LSF or Grid Engine.
    Batch,
}

/// Found once; nothing of it changes while a process runs.
pub(super) fn place() -> Place {
    // Its number is the kernel's own.
    const FIRST_NAMESPACE: &str = "pid:[4026531836]";
    let namespace = fs::read_link("/proc/self/ns/pid");
    place_by(
        |path| Path::new(path).exists(),
        |name| std::env::var(name).ok().filter(|value| !value.is_empty()),
        namespace.is_ok_and(|namespace| namespace.as_os_str() != FIRST_NAMESPACE),
    )
}

/// `is_apart`: in a PID namespace of its own, as in containers of containerd, which say nothing else.
fn place_by(
    is_there: impl Fn(&str) -> bool,
    variable: impl Fn(&str) -> Option<String>,
    is_apart: bool,
) -> Place {
    let is_set = |name| variable(name).is_some();
    let engine = variable("container");
    // A pod may be made by Docker or with Podman's libraries, and run a job: what asks for devices is Kubernetes then.
    if is_set("KUBERNETES_SERVICE_HOST") || is_there("/var/run/secrets/kubernetes.io") {
        return Place::Kubernetes;
    }
    // It may be in a job of Slurm.
    if is_set("APPTAINER_CONTAINER") || is_set("SINGULARITY_CONTAINER") {
        return Place::Apptainer;
    }
    let container = if is_there("/run/.containerenv") || engine.as_deref() == Some("podman") {
        Some(Place::Podman)
    } else if is_there("/.dockerenv") {
        Some(Place::Docker)
    } else {
        engine.map(|_| Place::Container)
    };
    // Their variables are in a container only if the runner made it. Slurm's may be passed on to one of a user's.
    match container {
        Some(_) if is_set("GITHUB_ACTIONS") => Place::GitHubContainer,
        Some(_) if is_set("GITLAB_CI") => Place::GitLabContainer,
        Some(container) => container,
        None if is_set("GITHUB_ACTIONS") => Place::GitHub,
        None if is_set("GITLAB_CI") => Place::GitLab,
        None if is_set("SLURM_JOB_ID") => Place::Slurm,
        None if is_set("PBS_JOBID") || is_set("LSB_JOBID") || is_set("SGE_ROOT") => Place::Batch,
        None if is_apart => Place::Container,
        None => Place::Host,
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
            Place::Apptainer => "a container of Apptainer",
            Place::Container => "a container",
            Place::GitHub => "no container, a job of GitHub Actions",
            Place::GitHubContainer => "the container of a job of GitHub Actions",
            Place::GitLab => "no container, a job of GitLab CI",
            Place::GitLabContainer => "the container of a job of GitLab CI",
            Place::Slurm => "no container, a job of Slurm",
            Place::Batch => "no container, a job of a batch system",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(file: &str, variables: &[&str]) -> Place {
        found_in(false, file, variables)
    }

    fn found_in(is_apart: bool, file: &str, variables: &[&str]) -> Place {
        place_by(
            |path| path == file,
            |name| {
                let found = variables
                    .iter()
                    .find_map(|set| set.strip_prefix(name)?.strip_prefix('='));
                found.map(str::to_owned)
            },
            is_apart,
        )
    }

    #[test]
    fn engines_are_told_apart() {
        assert_eq!(found("", &[]), Place::Host);
        assert_eq!(found("/.dockerenv", &[]), Place::Docker);
        assert_eq!(found("/run/.containerenv", &[]), Place::Podman);
        assert_eq!(found("", &["container=podman"]), Place::Podman);
        assert_eq!(found("", &["container=lxc"]), Place::Container);
        assert_eq!(found_in(true, "", &[]), Place::Container);
        assert_eq!(found_in(true, "/.dockerenv", &[]), Place::Docker);
        let pod = ["KUBERNETES_SERVICE_HOST=10.0.0.1", "GITHUB_ACTIONS=true"];
        assert_eq!(found("/.dockerenv", &pod), Place::Kubernetes);
    }

    #[test]
    fn jobs_are_told_apart_from_their_containers() {
        let github = ["GITHUB_ACTIONS=true"];
        assert_eq!(found("", &github), Place::GitHub);
        assert_eq!(found("/.dockerenv", &github), Place::GitHubContainer);
        let gitlab = ["GITLAB_CI=true"];
        assert_eq!(found("", &gitlab), Place::GitLab);
        assert_eq!(found("/.dockerenv", &gitlab), Place::GitLabContainer);
        let slurm = ["SLURM_JOB_ID=17"];
        assert_eq!(found("", &slurm), Place::Slurm);
        assert_eq!(found_in(true, "", &slurm), Place::Slurm);
        assert_eq!(found("/run/.containerenv", &slurm), Place::Podman);
        for job in ["PBS_JOBID=17.server", "LSB_JOBID=17", "SGE_ROOT=/opt/sge"] {
            assert_eq!(found("", &[job]), Place::Batch);
        }
        for image in ["APPTAINER_CONTAINER=/i.sif", "SINGULARITY_CONTAINER=/i.sif"] {
            assert_eq!(found("", &[image, slurm[0]]), Place::Apptainer);
        }
    }
}
