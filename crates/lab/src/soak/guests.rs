//! The programs of the mix, and what keeps each of them busy. This runs under memfold itself, as
//! the program that starts the others.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Read, Write, stdin},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};

use super::{READY, mix::Guest};
use crate::{
    Options,
    kernel::{redis, start_to_end_with_us},
};

/// The hidden subcommand that starts the others.
pub const GUESTS: &str = "soak-guests";
pub const GUESTS_OPTIONS: &[&str] = &["folder", "guests", "python"];

/// How long a request may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two requests: the mix leaves the machine some time.
const PAUSE: Duration = Duration::from_millis(2);
const REDIS_KEYS: usize = 20_000;
/// Between two rounds of overwriting and saving everything.
const REDIS_PAUSE: Duration = Duration::from_millis(300);

/// What the programs share.
struct Mix {
    folder: PathBuf,
    python: String,
    /// So many are not ready yet.
    starting: AtomicUsize,
}

/// Runs the programs until standard input ends, or the first of them fails.
pub fn run(options: &Options) -> Result<()> {
    let guests = options.list("guests", "");
    let guests: Vec<Guest> = guests
        .into_iter()
        .map(Guest::parse)
        .collect::<Result<_>>()?;
    let mix = Mix {
        folder: options.value("folder").context("no folder given")?.into(),
        python: options.value("python").unwrap_or("python3").to_owned(),
        starting: AtomicUsize::new(guests.len()),
    };
    File::create(mix.going())?;
    thread::scope(|scope| {
        for guest in guests {
            let mix = &mix;
            scope.spawn(move || {
                if let Err(error) = mix.run(guest) {
                    // The others get a signal as this process ends.
                    eprintln!("memfold-lab: {}: {error:#}", guest.name());
                    std::process::exit(1);
                }
            });
        }
        // At its end, whoever started this has had enough, or is gone.
        let read = stdin().read_to_end(&mut Vec::new());
        fs::remove_file(mix.going())?;
        read.context("standard input").map(drop)
    })
}

impl Mix {
    /// The file that is there as long as the programs are to run.
    fn going(&self) -> PathBuf {
        self.folder.join("going")
    }

    fn is_going(&self) -> bool {
        self.going().exists()
    }

    fn run(&self, guest: Guest) -> Result<()> {
        match guest {
            Guest::Node => self.ask_node(),
            Guest::Redis => self.overwrite_redis(),
            Guest::Python | Guest::Shell | Guest::Mappings => self.watch(guest),
        }
    }

    fn command(&self, guest: Guest) -> Command {
        let program = self.folder.join(guest.file());
        let mut command = match guest {
            Guest::Node => Command::new("node"),
            Guest::Python => Command::new(&self.python),
            Guest::Shell => Command::new("sh"),
            Guest::Mappings => Command::new(&program),
            Guest::Redis => Command::new("redis-server"),
        };
        match guest {
            Guest::Mappings | Guest::Redis => {}
            _ => drop(command.arg(program)),
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command
    }

    /// Starts one of those that run while the file is there, and waits for its first line.
    fn start(&self, guest: Guest) -> Result<(Child, String)> {
        let mut command = self.command(guest);
        command.arg(self.going());
        let mut child = start(&mut command)?;
        let output = child.stdout.take().context("it has no output")?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        ensure!(!line.is_empty(), "it ended with {}", child.wait()?);
        Ok((child, line.trim().to_owned()))
    }

    fn is_ready(&self) {
        if self.starting.fetch_sub(1, Ordering::Relaxed) == 1 {
            println!("{READY}");
        }
    }

    /// One that needs nobody to keep it busy.
    fn watch(&self, guest: Guest) -> Result<()> {
        let (child, _) = self.start(guest)?;
        self.is_ready();
        self.end(child)
    }

    fn ask_node(&self) -> Result<()> {
        let (child, port) = self.start(Guest::Node)?;
        let mut stream = BufReader::new(TcpStream::connect(("127.0.0.1", port.parse()?))?);
        stream.get_ref().set_read_timeout(Some(PATIENCE))?;
        self.is_ready();
        while self.is_going() {
            if let Err(error) = get(&mut stream) {
                if self.is_going() {
                    return Err(error);
                }
                break;
            }
            thread::sleep(PAUSE);
        }
        self.end(child)
    }

    fn overwrite_redis(&self) -> Result<()> {
        let port = redis::free_port()?;
        let mut command = self.command(Guest::Redis);
        command.args(redis::arguments(port, &self.folder));
        let mut server = redis::Server::new(start(command.stdout(Stdio::null()))?);
        let mut client = redis::connect(port, &mut server)?;
        let mut round = 0;
        while self.is_going() {
            let value = |index| redis::value(round * REDIS_KEYS + index);
            let saves = round > 0;
            if saves {
                client.status("BGSAVE")?;
            }
            client.fill(REDIS_KEYS, value)?;
            if saves {
                client.wait_for_save()?;
            }
            let wrong = client.wrong_keys(REDIS_KEYS, value)?;
            ensure!(wrong == 0, "WRONG RESULT: {wrong} keys");
            if round == 0 {
                self.is_ready();
            }
            round += 1;
            thread::sleep(REDIS_PAUSE);
        }
        client.shut_down()?;
        redis::check(&mut server)
    }

    /// Waits for the end of a program, which must not come before it was asked for.
    fn end(&self, mut child: Child) -> Result<()> {
        let status = child.wait()?;
        ensure!(status.success(), "it ended with {status}");
        if self.is_going() {
            bail!("it ended early");
        }
        Ok(())
    }
}

fn start(command: &mut Command) -> Result<Child> {
    start_to_end_with_us(command, libc::SIGKILL)
}

/// One request over a connection that stays.
fn get(stream: &mut BufReader<TcpStream>) -> Result<()> {
    stream
        .get_mut()
        .write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
    let mut length = 0;
    loop {
        let mut line = String::new();
        ensure!(
            stream.read_line(&mut line)? > 0,
            "the server closed the connection"
        );
        let line = line.trim_end().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse()?;
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    ensure!(length > 0, "the server answers nothing");
    Ok(())
}

/// Writes what a program is made of into a folder.
pub fn write(guest: Guest, folder: &Path) -> Result<()> {
    let Some(source) = guest.source() else {
        return Ok(());
    };
    let program = folder.join(guest.file());
    if guest != Guest::Mappings {
        return Ok(fs::write(program, source)?);
    }
    let file = folder.join("mappings.c");
    fs::write(&file, source)?;
    let mut compiler = Command::new("cc");
    compiler.arg("-O2").arg("-o").arg(&program).arg(&file);
    let status = compiler.status().context("cc cannot be started")?;
    ensure!(status.success(), "cc cannot compile mappings.c: {status}");
    Ok(())
}
