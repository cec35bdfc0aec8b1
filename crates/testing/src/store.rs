//! Servers of Valkey or Redis, alone and in a cluster, that a test can kill, pause and restart.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Addresses of this host for the servers of a cluster that can be cut off from each other ([`Network`]).
pub const HOSTS: [&str; 6] = [
    "127.0.0.11",
    "127.0.0.12",
    "127.0.0.13",
    "127.0.0.14",
    "127.0.0.15",
    "127.0.0.16",
];

/// How long a server may take to answer, or a cluster to agree.
const PATIENCE: Duration = Duration::from_secs(30);

/// The server and its command line client: those of Valkey with `MEMFOLD_TEST_STORE=valkey`.
#[must_use]
pub fn store_programs() -> [&'static str; 2] {
    match std::env::var("MEMFOLD_TEST_STORE").as_deref() {
        Ok("valkey") => ["valkey-server", "valkey-cli"],
        _ => ["redis-server", "redis-cli"],
    }
}

/// Whether the host has the server and its command line client.
#[must_use]
pub fn has_store() -> bool {
    store_programs().iter().all(|name| {
        let found = Command::new(name)
            .arg("--version")
            .stdout(Stdio::null())
            .status();
        found.is_ok_and(|status| status.success())
    })
}

/// A server on this host, killed when it is dropped.
#[derive(Debug)]
pub struct StoreServer {
    child: Child,
    folder: PathBuf,
    options: Vec<String>,
    /// The address of this host that it listens on, and connects from.
    pub host: String,
    /// Its port there.
    pub port: u16,
}

/// A port of this host that had no listener a moment ago.
///
/// # Panics
/// If there is none.
#[must_use]
pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("its address").port()
}

impl StoreServer {
    /// Starts a server with these options, such as `["--requirepass", "x"]`, that keeps its files in
    /// `folder`.
    ///
    /// # Panics
    /// If it cannot be started.
    #[must_use]
    pub fn start(folder: &Path, options: &[&str]) -> Self {
        Self::start_at("127.0.0.1", folder, options)
    }

    /// The same at one of this host's addresses.
    ///
    /// # Panics
    /// If it cannot be started.
    #[must_use]
    pub fn start_at(host: &str, folder: &Path, options: &[&str]) -> Self {
        let port = free_port();
        let folder = folder.join(port.to_string());
        std::fs::create_dir_all(&folder).expect("a folder for the server");
        let own = [
            "--save",
            "",
            "--appendonly",
            "no",
            "--bind",
            host,
            "--bind-source-addr",
            host,
        ];
        let all = own.iter().chain(options);
        let all: Vec<String> = all.map(|option| (*option).to_owned()).collect();
        Self {
            child: Self::spawn(&folder, host, port, &all),
            folder,
            options: all,
            host: host.to_owned(),
            port,
        }
    }

    fn spawn(folder: &Path, host: &str, port: u16, options: &[String]) -> Child {
        let log = File::options()
            .create(true)
            .append(true)
            .open(folder.join("log"))
            .expect("a log");
        let plain = if options.iter().any(|option| option == "--tls-port") {
            0
        } else {
            port
        };
        let options = options
            .iter()
            .map(|option| option.replace("{port}", &port.to_string()));
        let [program, _] = store_programs();
        let child = Command::new(program)
            .args(["--port", &plain.to_string()])
            .args(options)
            .arg("--dir")
            .arg(folder)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("the log"))
            .stderr(log)
            .spawn()
            .expect("the server starts");
        let deadline = Instant::now() + PATIENCE;
        while TcpStream::connect((host, port)).is_err() {
            assert!(Instant::now() < deadline, "{program} does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        child
    }

    /// Its PID.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// Kills it at once. What it held is gone.
    ///
    /// # Panics
    /// If it cannot be killed.
    pub fn kill(&mut self) {
        self.child.kill().expect("the server is killed");
        self.child.wait().expect("it ends");
    }

    /// Starts it again after [`kill`](Self::kill), empty but for what it knows of its cluster.
    pub fn restart(&mut self) {
        self.child = Self::spawn(&self.folder, &self.host, self.port, &self.options);
    }

    /// Stops or continues it: a server that hangs.
    ///
    /// # Panics
    /// If the signal cannot be sent.
    pub fn pause(&self, paused: bool) {
        let signal = if paused { "-STOP" } else { "-CONT" };
        let sent = Command::new("kill")
            .args([signal, &self.pid().to_string()])
            .status();
        assert!(sent.expect("kill").success());
    }

    /// What a command answers, as `redis-cli` prints it.
    ///
    /// # Panics
    /// If the client cannot be run.
    #[expect(clippy::must_use_candidate, reason = "for what it does, too")]
    pub fn ask(&self, command: &[&str]) -> String {
        // A server that hangs answers nothing.
        let mut client = Command::new("timeout");
        let [_, program] = store_programs();
        client.args(["5", program, "-h", &self.host]);
        client.args(["-p", &self.port.to_string()]);
        if let Some(at) = self.options.iter().position(|one| one == "--requirepass") {
            client.env("REDISCLI_AUTH", &self.options[at + 1]);
        }
        let output = client.args(command).output().expect("the client runs");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        // It may have been killed by the test.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Three primaries with a replica each.
#[derive(Debug)]
pub struct StoreCluster {
    /// The servers; which of them are primaries changes.
    pub servers: Vec<StoreServer>,
}

impl StoreCluster {
    /// Starts a cluster that fails over within about two seconds.
    ///
    /// # Panics
    /// If it cannot be started.
    #[must_use]
    pub fn start(folder: &Path, options: &[&str]) -> Self {
        Self::start_at(&["127.0.0.1"; 6], folder, options)
    }

    /// The same with servers at these addresses of this host.
    ///
    /// # Panics
    /// If it cannot be started.
    #[must_use]
    pub fn start_at(hosts: &[&str; 6], folder: &Path, options: &[&str]) -> Self {
        let mut all = vec![
            "--cluster-enabled",
            "yes",
            "--cluster-node-timeout",
            "1000",
            "--cluster-replica-validity-factor",
            "0",
            // It takes connections from 127.0.0.1 alone otherwise.
            "--protected-mode",
            "no",
            "--repl-diskless-sync-delay",
            "0",
        ];
        all.extend(options);
        let start = |host: &&str| {
            let bus = free_port().to_string();
            let mut all = all.clone();
            all.extend(["--cluster-port", &bus]);
            StoreServer::start_at(host, folder, &all)
        };
        let servers: Vec<_> = hosts.iter().map(start).collect();
        let mut create = Command::new(store_programs()[1]);
        create.args(["--cluster", "create"]);
        let addresses = servers
            .iter()
            .map(|one| format!("{}:{}", one.host, one.port));
        create.args(addresses);
        create.args(["--cluster-replicas", "1", "--cluster-yes"]);
        let output = create.output().expect("the client runs");
        assert!(output.status.success(), "{output:?}");
        let cluster = Self { servers };
        cluster.wait_until_whole();
        cluster
    }

    /// Waits until all slots are served and each primary has a replica that follows it.
    ///
    /// # Panics
    /// If that takes too long.
    pub fn wait_until_whole(&self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let is_well = |server: &StoreServer| {
                let info = server.ask(&["CLUSTER", "INFO"]);
                let replication = server.ask(&["INFO", "replication"]);
                info.contains("cluster_state:ok")
                    && (replication.contains("state=online")
                        || replication.contains("master_link_status:up"))
            };
            if self.primaries().len() == 3 && self.servers.iter().all(is_well) {
                return;
            }
            assert!(Instant::now() < deadline, "the cluster does not agree");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Waits until the cluster is whole, and has no replica take over from then on, however long the servers get no CPU.
    ///
    /// # Panics
    /// If that takes too long.
    pub fn keep_primaries(&self) {
        for server in &self.servers {
            let set = server.ask(&["CONFIG", "SET", "cluster-node-timeout", "60000"]);
            assert_eq!(set, "OK");
        }
        self.wait_until_whole();
    }

    /// Indices of the servers that say they are primaries.
    #[must_use]
    pub fn primaries(&self) -> Vec<usize> {
        let is_primary = |index: &usize| {
            let role = self.servers[*index].ask(&["ROLE"]);
            role.starts_with("master")
        };
        (0..self.servers.len()).filter(is_primary).collect()
    }

    /// Waits until `count` servers, `except` not among them, say that they are primaries.
    ///
    /// # Panics
    /// If that takes too long.
    pub fn wait_for_primaries(&self, count: usize, except: usize) {
        let deadline = Instant::now() + PATIENCE;
        let is_primary = |index: &usize| {
            *index != except && self.servers[*index].ask(&["ROLE"]).starts_with("master")
        };
        while (0..self.servers.len()).filter(is_primary).count() < count {
            assert!(Instant::now() < deadline, "no replica takes over");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Keys in all primaries.
    #[must_use]
    pub fn keys(&self) -> u64 {
        let size = |index: usize| self.servers[index].ask(&["DBSIZE"]).parse().unwrap_or(0);
        self.primaries()
            .into_iter()
            .map(size)
            .collect::<Vec<u64>>()
            .iter()
            .sum()
    }
}

/// A network of this thread's own, and of the processes that it starts, which can be split.
#[derive(Debug)]
pub struct Network(());

impl Network {
    /// Moves this thread into a network namespace in which it has the loopback device alone. Needs root,
    /// `ip` and `iptables`.
    ///
    /// # Panics
    /// If that is refused.
    #[must_use]
    pub fn enter() -> Self {
        // A new one, in which a shell waits until this thread is there too.
        let mut holder = Command::new("unshare")
            .args(["--net", "sh", "-c"])
            .arg("ip link set lo up && echo ready && read end")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare starts");
        let mut ready = [0; 6];
        let output = holder.stdout.as_mut().expect("a pipe");
        output.read_exact(&mut ready).expect("a network");
        let file = File::open(format!("/proc/{}/ns/net", holder.id())).expect("the network");
        let kind = Some(rustix::thread::LinkNameSpaceType::Network);
        rustix::thread::move_into_link_name_space(file.as_fd(), kind).expect("this thread enters");
        drop(holder.stdin.take());
        holder.wait().expect("the shell ends");
        Self(())
    }

    /// Has the network drop what these addresses send to those, and what those send to these. Packets are
    /// lost without a word, as between machines.
    ///
    /// # Panics
    /// If `iptables` fails.
    pub fn split(&self, these: &[&str], those: &[&str]) {
        for this in these {
            for that in those {
                for (from, to) in [(this, that), (that, this)] {
                    Self::iptables(&["-A", "OUTPUT", "-s", from, "-d", to, "-j", "DROP"]);
                }
            }
        }
    }

    /// Joins what was split.
    ///
    /// # Panics
    /// If `iptables` fails.
    pub fn join(&self) {
        Self::iptables(&["-F", "OUTPUT"]);
    }

    fn iptables(arguments: &[&str]) {
        let path = format!("{}:/usr/sbin", std::env::var("PATH").unwrap_or_default());
        let status = Command::new("iptables")
            .args(arguments)
            .env("PATH", path)
            .status();
        assert!(status.expect("iptables runs").success(), "{arguments:?}");
    }
}

/// A proxy in front of a port, which can cut its connections, hold back what passes, or change the answers.
#[derive(Debug)]
pub struct Proxy {
    /// The port to connect to.
    pub port: u16,
    state: Arc<AtomicU8>,
}

/// What a [`Proxy`] does with what passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Passing {
    /// Passes it on.
    Free,
    /// Holds it back: neither data nor an end of the connection arrives.
    Held,
    /// Closes connections.
    Cut,
    /// Passes on one byte of the answers in each [`DRIP`].
    Dripping,
    /// Answers with a string of 512 MiB, as fast as it is read.
    Huge,
}

/// The interval of [`Passing::Dripping`].
pub const DRIP: Duration = Duration::from_secs(1);

/// The longest that a change of what passes takes effect after.
const STEP: Duration = Duration::from_millis(5);

impl Proxy {
    /// A proxy to a port of this host. It lives as long as the process.
    ///
    /// # Panics
    /// If there is no free port.
    #[must_use]
    pub fn to(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("its address").port();
        let state = Arc::new(AtomicU8::new(Passing::Free as u8));
        let of_threads = state.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(("127.0.0.1", target)) else {
                    continue;
                };
                let copy = |socket: &TcpStream| socket.try_clone().expect("a socket");
                for (from, to, are_answers) in [
                    (copy(&client), copy(&server), false),
                    (copy(&server), copy(&client), true),
                ] {
                    let pass = Pass {
                        from,
                        to,
                        are_answers,
                        state: of_threads.clone(),
                    };
                    std::thread::spawn(move || pass.run());
                }
            }
        });
        Self { port, state }
    }

    /// What passes from now on.
    pub fn set(&self, passing: Passing) {
        self.state.store(passing as u8, SeqCst);
    }
}

/// One direction of a connection through a [`Proxy`].
struct Pass {
    from: TcpStream,
    to: TcpStream,
    are_answers: bool,
    state: Arc<AtomicU8>,
}

impl Pass {
    fn is(&self, passing: Passing) -> bool {
        self.state.load(SeqCst) == passing as u8
    }

    fn run(mut self) {
        let mut buffer = vec![0; 1 << 16];
        self.from.set_read_timeout(Some(STEP)).expect("a timeout");
        while !self.is(Passing::Cut) {
            if self.is(Passing::Held) {
                std::thread::sleep(STEP);
                continue;
            }
            match self.from.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => {
                    if self.forward(&buffer[..length]).is_err() {
                        break;
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => break,
            }
        }
        let _ = self.from.shutdown(std::net::Shutdown::Both);
        let _ = self.to.shutdown(std::net::Shutdown::Both);
    }

    fn forward(&mut self, data: &[u8]) -> std::io::Result<()> {
        while self.is(Passing::Held) {
            std::thread::sleep(STEP);
        }
        if self.are_answers && self.is(Passing::Huge) {
            self.to.write_all(b"$536870912\r\n")?;
            let zeros = vec![0; 1 << 20];
            for _ in 0..512 {
                self.to.write_all(&zeros)?;
            }
            return self.to.write_all(b"\r\n");
        }
        for (index, byte) in data.iter().enumerate() {
            if !(self.are_answers && self.is(Passing::Dripping)) {
                return self.to.write_all(&data[index..]);
            }
            self.to.write_all(&[*byte])?;
            std::thread::sleep(DRIP);
        }
        Ok(())
    }
}
