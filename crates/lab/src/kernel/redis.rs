//! redis-server under a limit, loaded by redis-benchmark; afterwards every key is verified.

mod client;

use std::{
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

pub use self::client::Client;
use super::{
    backend::Session,
    measure,
    scale::Scale,
    workload::{Figures, Wrong},
};
use crate::{random::Random, report::Samples};

/// Bytes of a value.
const VALUE_BYTES: usize = 1000;
/// Approximate memory of a server with [`LEAST_KEYS`], in MB.
pub const LEAST_MEGABYTES: usize = 56;
/// Fewest keys at any scale.
const LEAST_KEYS: usize = 50_000;
const PHRASE: &[u8] = b"session user account profile created updated expires region language \
product category price quantity discount shipping address order status ";

/// The two sides of the connection, which run on CPUs of their own.
#[derive(Debug, Clone, Copy)]
enum Side {
    Server,
    Client,
}

/// The size of the store and the load.
#[derive(Debug)]
pub struct Load {
    /// Whether a background save runs during the load.
    save: bool,
    keys: usize,
    requests: usize,
}

impl Load {
    /// The load at a scale.
    pub fn new(save: bool, scale: Scale) -> Self {
        Self {
            save,
            keys: scale.count(310_000, LEAST_KEYS),
            requests: scale.count(150_000, 5_000),
        }
    }

    /// Why it cannot run on this host, if so.
    pub fn missing() -> Option<String> {
        let missing = ["redis-server", "redis-benchmark", "taskset"]
            .into_iter()
            .find(|tool| Command::new(tool).arg("--version").output().is_err())?;
        Some(format!(
            "{missing} is not installed (Debian: redis-server, redis-tools, util-linux)"
        ))
    }

    /// One run: fill; GET over 50 connections with one request in flight each, with 16, and,
    /// without a save, with one again; verify.
    pub fn run(&self, session: &Session) -> Result<Figures> {
        let port = free_port()?;
        let server = [
            self.pinned(Side::Server),
            vec!["redis-server".to_owned()],
            arguments(port, session.folder()),
        ];
        let words = server.concat();
        let mut command = session.command(words[0].as_ref(), &words[1..])?;
        let mut server = Server::new(measure::start(command.stdout(Stdio::null()))?);
        let stop = AtomicBool::new(false);
        let figures = std::thread::scope(|scope| {
            let watcher = scope.spawn(|| session.watch(&stop));
            let figures = self.ask(port, &mut server);
            stop.store(true, Ordering::Relaxed);
            watcher.thread().unpark();
            figures
        })?;
        let ended = server.end()?;
        measure::check(ended.status)?;
        if self.save {
            self.check_dump(session.folder())?;
        }
        let mut all = figures;
        all.0.extend(ended.figures().0);
        Ok(all)
    }

    /// The `taskset` prefix that pins the client to the last CPU and the server to the others:
    /// scheduler placement varies the result more than the backends do. None with a save, whose
    /// process needs a CPU as well.
    fn pinned(&self, side: Side) -> Vec<String> {
        let cpus = memfold_sys::thread::allowed_cpus();
        let Some((clients, servers)) = cpus.split_last().filter(|(_, rest)| !rest.is_empty())
        else {
            return Vec::new();
        };
        if self.save {
            return Vec::new();
        }
        let list = match side {
            Side::Client => vec![clients.to_string()],
            Side::Server => servers.iter().map(usize::to_string).collect(),
        };
        ["taskset", "-c", &list.join(",")].map(str::to_owned).into()
    }

    fn ask(&self, port: u16, server: &mut Server) -> Result<Figures> {
        let mut client = connect(port, server)?;
        client.fill(self.keys, value)?;
        let started = Instant::now();
        if self.save {
            ensure!(
                client.status("BGSAVE")?.starts_with("Background saving"),
                "redis-server did not start the background save"
            );
        }
        let (load, saved) = std::thread::scope(|scope| {
            let saved = self.save.then(|| {
                scope.spawn(|| -> Result<Duration> {
                    Client::connect(port)?.wait_for_save()?;
                    Ok(started.elapsed())
                })
            });
            let load = self.load(port, started);
            let saved =
                saved.map(|saved| saved.join().expect("a save is waited for without panics"));
            (load, saved.transpose())
        });
        let ([plain, pipelined], ended) = load?;
        let mut figures = Figures::default()
            .with("requests_per_s", plain.field("rps")?)
            .with("requests_pipelined_per_s", pipelined.field("rps")?)
            .with("latency_p50_us", plain.field("p50_latency_ms")? * 1e3)
            .with("latency_p99_us", plain.field("p99_latency_ms")? * 1e3)
            .with("latency_max_us", plain.field("max_latency_ms")? * 1e3);
        if let Some(saved) = saved? {
            figures = figures
                .with("save_s", saved.as_secs_f64())
                .with("save_share", share_beside(saved, ended));
        } else {
            // By now each backend had time to learn the hot pages.
            let settled = self.benchmark(port, 1)?;
            figures = figures.with("requests_settled_per_s", settled.field("rps")?);
        }
        let wrong = client.wrong_keys(self.keys, value)?;
        if wrong > 0 {
            bail!(Wrong(format!(
                "{wrong} of {} keys have a wrong value",
                self.keys
            )));
        }
        client.shut_down()?;
        Ok(figures)
    }

    /// The load with one request in flight and with 16; when it ended, after `started`.
    fn load(&self, port: u16, started: Instant) -> Result<([Table; 2], Duration)> {
        let plain = self.benchmark(port, 1)?;
        let pipelined = self.benchmark(port, 16)?;
        Ok(([plain, pipelined], started.elapsed()))
    }

    fn benchmark(&self, port: u16, pipeline: usize) -> Result<Table> {
        let asked = format!(
            "redis-benchmark -p {port} -t get -c 50 -n {} -r {} -P {pipeline} --csv",
            self.requests, self.keys
        );
        let mut words = self.pinned(Side::Client);
        words.extend(asked.split(' ').map(str::to_owned));
        let output = Command::new(&words[0]).args(&words[1..]).output()?;
        ensure!(
            output.status.success(),
            "redis-benchmark exited with {}",
            output.status
        );
        Table::parse(&String::from_utf8_lossy(&output.stdout))
    }

    /// Loads the dump into a new server without a limit and verifies every key.
    fn check_dump(&self, folder: &Path) -> Result<()> {
        let port = free_port()?;
        let mut command = Command::new("redis-server");
        command.args(arguments(port, folder)).stdout(Stdio::null());
        let mut server = Server::new(measure::start(&mut command)?);
        let mut client = connect(port, &mut server)?;
        let wrong = client.wrong_keys(self.keys, value)?;
        if wrong > 0 {
            bail!(Wrong(format!(
                "{wrong} of {} keys of the dump have a wrong value",
                self.keys
            )));
        }
        client.shut_down()?;
        check(&mut server)
    }
}

/// The part of the load that a save ran beside, both from the same start.
fn share_beside(saved: Duration, ended: Duration) -> f64 {
    (saved.as_secs_f64() / ended.as_secs_f64()).min(1.0)
}

/// What to say of runs whose saves ended before their loads did, by the median of `save_share`.
pub fn remark(shares: &Samples) -> Option<String> {
    let percent = (shares.median() * 100.0).round();
    // Without samples the median is NaN.
    (percent < 100.0).then(|| {
        format!("the save ran beside {percent} % of the load: the rest was measured without one")
    })
}

/// A server, or a memfold that runs one; killed and reaped on drop.
pub struct Server(Option<Child>);

impl Server {
    /// Takes over a started server.
    pub fn new(child: Child) -> Self {
        Self(Some(child))
    }

    fn has_ended(&mut self) -> Result<bool> {
        let child = self.0.as_mut().context("the server was reaped already")?;
        // Not try_wait, which would reap it: its CPU time is read later.
        let state = std::fs::read_to_string(format!("/proc/{}/stat", child.id()))?;
        Ok(state
            .rsplit(')')
            .next()
            .is_some_and(|rest| rest.trim_start().starts_with('Z')))
    }

    fn end(&mut self) -> Result<measure::CpuUsage> {
        measure::end(self.0.take().context("the server was reaped already")?)
    }
}

/// Waits for a server that is shutting down.
pub fn check(server: &mut Server) -> Result<()> {
    measure::check(server.end()?.status)
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            // Errors are ignored: drop with a running server follows another error.
            let _ = child.kill().and_then(|()| child.wait());
        }
    }
}

/// The value of key `index`: repeated phrases with unique parts, whose pages lz4 compresses about
/// 2.2:1. redis-benchmark's own values, one repeated letter, would flatter every compressor.
pub fn value(index: usize) -> Vec<u8> {
    let mut random = Random::new(index as u64 + 1);
    let mut value = Vec::with_capacity(VALUE_BYTES + 64);
    while value.len() < VALUE_BYTES {
        let start = random.below(PHRASE.len() - 40);
        value.extend_from_slice(&PHRASE[start..start + 16 + random.below(24)]);
        value.extend_from_slice(format!("\"{:x}\",", random.next() >> 24).as_bytes());
    }
    value.truncate(VALUE_BYTES);
    value
}

/// Arguments of redis-server.
pub fn arguments(port: u16, folder: &Path) -> Vec<String> {
    let words = format!(
        "--port {port} --bind 127.0.0.1 --appendonly no --loglevel warning --dir {}",
        folder.display()
    );
    let mut words: Vec<String> = words.split(' ').map(str::to_owned).collect();
    words.extend(["--save".to_owned(), String::new()]);
    words
}

/// A free TCP port.
pub fn free_port() -> Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// Connects as soon as the server replies to PING.
pub fn connect(port: u16, server: &mut Server) -> Result<Client> {
    /// How long the server may take to start, and to load its dump.
    const TIMEOUT: Duration = Duration::from_secs(60);
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Ok(mut client) = Client::connect(port)
            && client.status("PING").is_ok_and(|answer| answer == "PONG")
        {
            return Ok(client);
        }
        ensure!(
            !server.has_ended()? && Instant::now() < deadline,
            "redis-server exited, or did not reply to PING within {} s",
            TIMEOUT.as_secs()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The last row of redis-benchmark's `--csv`, with the header.
struct Table {
    header: Vec<String>,
    row: Vec<String>,
}

impl Table {
    fn parse(text: &str) -> Result<Self> {
        let mut lines = text.lines().rev().filter(|line| line.starts_with('"'));
        let row = lines.next().context("redis-benchmark printed no row")?;
        let header = lines.next().context("redis-benchmark printed no header")?;
        Ok(Self {
            header: words(header),
            row: words(row),
        })
    }

    fn field(&self, name: &str) -> Result<f64> {
        let place = self.header.iter().position(|one| one == name);
        let word = place.and_then(|place| self.row.get(place));
        let word = word.with_context(|| format!("redis-benchmark printed no {name}"))?;
        Ok(word.parse()?)
    }
}

fn words(line: &str) -> Vec<String> {
    line.split(',')
        .map(|word| word.trim_matches('"').to_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_differ_by_key() {
        assert_eq!(value(7), value(7));
        assert_ne!(value(7), value(8));
        assert_eq!(value(0).len(), VALUE_BYTES);
    }

    #[test]
    fn a_save_that_ends_before_the_load_is_named() {
        let shares = |saved: &[u64]| {
            let saved = saved.iter().copied().map(Duration::from_secs);
            let share = |saved| share_beside(saved, Duration::from_secs(6));
            saved.map(share).collect::<Samples>()
        };
        assert_eq!(remark(&shares(&[2, 9, 9])), None);
        assert!(remark(&shares(&[1, 3, 9])).unwrap().contains("50 %"));
        assert_eq!(remark(&Samples::new()), None);
    }

    #[test]
    fn the_csv_of_redis_benchmark_is_parsed() {
        let text = "\"test\",\"rps\",\"p99_latency_ms\"\n\"GET\",\"80000.5\",\"0.5\"\n";
        let table = Table::parse(text).unwrap();
        assert_eq!(table.field("rps").unwrap(), 80000.5);
        assert_eq!(table.field("p99_latency_ms").unwrap(), 0.5);
        assert!(table.field("unknown").is_err() && Table::parse("error").is_err());
    }
}
