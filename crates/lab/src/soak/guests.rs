//! Starts the programs of the mix and drives them. This process runs under memfold, as the parent
//! of the programs.

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

use memfold_sys::process::Process;

use super::{
    READY,
    mix::Guest,
    rest::{REST, RESTING, Rest, WORK},
};
use crate::{
    Options,
    kernel::{redis, start_to_end_with_us},
};

/// The hidden subcommand that starts the programs.
pub const GUESTS: &str = "soak-guests";
/// Its options.
pub const GUESTS_OPTIONS: &[&str] = &["folder", "guests", "python"];

/// How long one request may take before the run fails. Too small a value fails on a busy machine.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Delay between two requests to node. A smaller value loads the machine more.
const PAUSE: Duration = Duration::from_millis(2);
/// Keys of 1000 bytes that Redis holds.
const REDIS_KEYS: usize = 20_000;
/// Delay between two rounds of overwriting and saving all keys.
const REDIS_PAUSE: Duration = Duration::from_millis(300);

/// State shared by the threads that drive the programs.
struct Mix {
    folder: PathBuf,
    python: String,
    /// Number of programs that are not ready yet.
    starting: AtomicUsize,
    rest: Rest,
}

/// Runs the programs until end of file on standard input, or until one fails.
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
        rest: Rest::default(),
    };
    File::create(mix.going())?;
    thread::scope(|scope| {
        for guest in guests {
            let mix = &mix;
            scope.spawn(move || {
                if let Err(error) = mix.run(guest) {
                    // The kernel sends the others SIGKILL (PR_SET_PDEATHSIG) when this process
                    // exits.
                    eprintln!("memfold-lab: {}: {error:#}", guest.name());
                    std::process::exit(1);
                }
            });
        }
        let obeyed = mix.obey();
        // While all of them run: they exit once the file is gone.
        mix.rest.end()?;
        fs::remove_file(mix.going())?;
        obeyed
    })
}

impl Mix {
    /// The programs run while this file exists.
    fn going(&self) -> PathBuf {
        self.folder.join("going")
    }

    fn is_going(&self) -> bool {
        self.going().exists()
    }

    /// Begins and ends rests until end of file: the lab stops the run, or has exited.
    fn obey(&self) -> Result<()> {
        for line in stdin().lines() {
            match line.context("standard input")?.as_str() {
                REST => {
                    self.rest.begin()?;
                    println!("{RESTING}");
                }
                WORK => self.rest.end()?,
                other => bail!("standard input: unknown request {other:?}"),
            }
        }
        Ok(())
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

    /// Starts a program that runs while the file exists, and waits for its first line.
    fn start(&self, guest: Guest) -> Result<(Child, String)> {
        let mut command = self.command(guest);
        command.arg(self.going());
        let mut child = start(&mut command)?;
        let output = child.stdout.take().context("no standard output")?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        ensure!(!line.is_empty(), "exited with {}", child.wait()?);
        Ok((child, line.trim().to_owned()))
    }

    fn mark_ready(&self) {
        if self.starting.fetch_sub(1, Ordering::Relaxed) == 1 {
            println!("{READY}");
        }
    }

    /// Runs a program that needs no requests.
    fn watch(&self, guest: Guest) -> Result<()> {
        let (child, _) = self.start(guest)?;
        self.rest
            .add_program(Process::open(child.id().cast_signed())?);
        self.mark_ready();
        self.end(child)
    }

    fn ask_node(&self) -> Result<()> {
        let (child, port) = self.start(Guest::Node)?;
        let mut stream = BufReader::new(TcpStream::connect(("127.0.0.1", port.parse()?))?);
        stream.get_ref().set_read_timeout(Some(REQUEST_TIMEOUT))?;
        self.rest.add_driver();
        self.mark_ready();
        while self.is_going() {
            self.rest.wait_if_wanted();
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
        self.rest.add_driver();
        let mut round = 0;
        while self.is_going() {
            self.rest.wait_if_wanted();
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
                self.mark_ready();
            }
            round += 1;
            thread::sleep(REDIS_PAUSE);
        }
        client.shut_down()?;
        redis::check(&mut server)
    }

    /// Waits for a program to exit; exiting before the file is removed is an error.
    fn end(&self, mut child: Child) -> Result<()> {
        let status = child.wait()?;
        ensure!(status.success(), "exited with {status}");
        if self.is_going() {
            bail!("exited before the end of the run");
        }
        Ok(())
    }
}

fn start(command: &mut Command) -> Result<Child> {
    start_to_end_with_us(command, libc::SIGKILL)
}

/// One request over a persistent connection.
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
    ensure!(length > 0, "the server sent an empty response");
    Ok(())
}

/// Writes a program to a folder; the C program is compiled.
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
    let status = compiler.status().context("cannot start cc")?;
    ensure!(status.success(), "cc cannot compile mappings.c: {status}");
    Ok(())
}
