//! What watches a run besides its supervisor: `--metrics` and `--timeline`.

use super::metrics::{Metrics, MetricsAddress, Serving, Source};
use super::timeline::{self, About, Recording, Timeline, TimelinePath};
use crate::failure::Failure;
use clap::Args;
use memfold_pager::Supervisor;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

/// Their options.
#[derive(Debug, Default, Args)]
pub struct ObserverArguments {
    /// Draw the run into FILE when it ends: memory against the limit, faults, programs (.html or .svg)
    #[arg(long, value_name = "FILE", value_parser = timeline::parse)]
    #[arg(value_hint = clap::ValueHint::FilePath)]
    pub timeline: Option<TimelinePath>,
    /// Serve the statistics to Prometheus (OpenMetrics) at unix:PATH or HOST:PORT, a loopback address
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<MetricsAddress>,
}

/// What was opened for them, before the supervisor starts.
#[derive(Debug)]
pub struct Observers {
    timeline: Option<Timeline>,
    metrics: Option<Metrics>,
}

/// They observe until this is finished.
pub struct Observing {
    recording: Option<Recording>,
    serving: Option<Serving>,
}

impl Observers {
    /// Opens the file and listens at the address. To be called while there is one thread that creates
    /// files.
    pub fn open(arguments: &ObserverArguments) -> Result<Observers, Failure> {
        Ok(Observers {
            timeline: arguments
                .timeline
                .as_ref()
                .map(Timeline::open)
                .transpose()?,
            metrics: arguments.metrics.as_ref().map(Metrics::bind).transpose()?,
        })
    }

    /// Starts their threads; signals must be blocked.
    pub fn start(
        self,
        supervisor: &Supervisor,
        program: &str,
        unmanaged: &Arc<AtomicU64>,
    ) -> Result<Observing, Failure> {
        let failed = |option: &str, error: io::Error| {
            Failure::own(format!("cannot start a thread for {option}: {error}"))
        };
        let serving = self.metrics.map(|metrics| {
            metrics.serve(Source {
                control: supervisor.control(),
                unmanaged: unmanaged.clone(),
                program: program.to_owned(),
                started: Instant::now(),
            })
        });
        let recording = self
            .timeline
            .map(|timeline| timeline.record(supervisor.control()));
        Ok(Observing {
            serving: serving
                .transpose()
                .map_err(|error| failed("--metrics", error))?,
            recording: recording
                .transpose()
                .map_err(|error| failed("--timeline", error))?,
        })
    }
}

impl Observing {
    /// Ends them, while the supervisor still runs, and writes what they made. A failure is logged: the
    /// program's exit status stays what it is.
    pub fn finish(self, about: &About) {
        drop(self.serving);
        if let Some(recording) = self.recording
            && let Err(error) = recording.finish(about)
        {
            log::error!("cannot write the picture to --timeline: {error}");
        }
    }
}
