//! What the tests of the backend share.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test program uses a part of it"
)]

use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use memfold_remote::{Options, Password, RemoteStore};
use memfold_swap::{LoadError, PAGE_SIZE, Page, ScanPolicy, Scratch, Slot, SwapConfig, SwapSpace};
use memfold_testing::store::{StoreServer, has_store, store_programs};
use memfold_testing::{Random, skip};
use zsmalloc::HeapSource;

pub fn folder() -> Option<tempfile::TempDir> {
    if !has_store() {
        skip(&store_programs().join(" and "));
        return None;
    }
    Some(tempfile::tempdir().expect("a folder"))
}

pub fn options(port: u16) -> Options {
    let address = format!("valkey://127.0.0.1:{port}");
    let mut options = Options::new(address.parse().unwrap());
    options.patience = Duration::from_secs(20);
    options
}

/// The command in docs/remote.md that makes a user for memfold alone: user `memfold`, password `PASSWORD`. Its manifest
/// has the same.
fn documented_user() -> Vec<String> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/remote.md");
    let text = std::fs::read_to_string(path).expect("the document");
    let rights = |start: &str| {
        let mut lines = text.lines();
        lines.find_map(|line| line.trim().strip_prefix(start))
    };
    let of_user = rights("ACL SETUSER memfold ").expect("a command");
    assert_eq!(rights("user memfold "), Some(of_user));
    let words = ["ACL", "SETUSER", "memfold"].into_iter();
    let words = words.chain(of_user.split_whitespace());
    words.map(str::to_owned).collect()
}

/// Makes that user known to these servers, and has it used.
pub fn use_documented_user(servers: &[StoreServer], options: &mut Options) {
    let command = documented_user();
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    for server in servers {
        assert_eq!(server.ask(&command), "OK");
    }
    options.user = Some("memfold".to_owned());
    options.password = Some(Password::new("PASSWORD".to_owned()));
}

/// The warnings of this process.
pub struct Warnings(Mutex<Vec<String>>);

impl Warnings {
    /// Collects them from now on.
    pub fn collect() -> &'static Warnings {
        static WARNINGS: Warnings = Warnings(Mutex::new(Vec::new()));
        // Another test may have done so.
        if log::set_logger(&WARNINGS).is_ok() {
            log::set_max_level(log::LevelFilter::Warn);
        }
        &WARNINGS
    }

    /// The number of those with this text.
    pub fn with(&self, text: &str) -> usize {
        let all = self.0.lock().unwrap();
        all.iter().filter(|one| one.contains(text)).count()
    }
}

impl log::Log for Warnings {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            self.0.lock().unwrap().push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

pub fn page(seed: u64) -> Page {
    let mut page = [0; PAGE_SIZE];
    let mut random = Random::new(seed);
    for (index, bytes) in page.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let word = if index % 3 == 0 || seed.is_multiple_of(5) {
            random.next_word()
        } else {
            seed
        };
        *bytes = word.to_le_bytes();
    }
    page
}

pub struct World {
    pub space: SwapSpace<HeapSource>,
    pub store: RemoteStore,
    pub stored: Vec<(Slot, u64)>,
}

impl World {
    /// A space whose pages are all in the store.
    pub fn new(options: &Options, pages: u64) -> Self {
        let store = RemoteStore::open(options).unwrap();
        let config = SwapConfig {
            pool_capacity_pages: 1 << 15,
            max_slots: 1 << 16,
            ..SwapConfig::default()
        };
        let mut space = SwapSpace::new(HeapSource::new(), config).unwrap();
        space.add_tier(Box::new(store.tier())).unwrap();
        let mut world = Self {
            space,
            store,
            stored: Vec::new(),
        };
        world.store_more(pages);
        world
    }

    pub fn store_more(&mut self, pages: u64) {
        let first = self.stored.len() as u64 + 1;
        let mut scratch = Scratch::new();
        for seed in first..first + pages {
            let slot = self.space.store(&page(seed), &mut scratch).unwrap();
            self.stored.push((slot, seed));
        }
    }

    pub fn write_back(&self) -> u64 {
        let policy = ScanPolicy {
            recompress: None,
            write_back: Some(1),
        };
        let mut scratch = Scratch::new();
        self.space.scan(policy, usize::MAX, &mut scratch);
        self.space.scan(policy, usize::MAX, &mut scratch);
        self.space.usage().remote_pages
    }

    /// Has all pages sent. On busy CPUs a server may not answer in time.
    #[track_caller]
    pub fn send_all(&self) {
        let began = Instant::now();
        while self.write_back() < self.stored.len() as u64 {
            assert!(
                began.elapsed() < Duration::from_secs(60),
                "not all are sent"
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    pub fn load(&self, slot: Slot) -> Result<Page, LoadError> {
        let mut out = [0; PAGE_SIZE];
        let loaded = self.space.load(slot, &mut out, &mut Scratch::new());
        loaded.map(|()| out)
    }

    #[track_caller]
    pub fn assert_all_right(&self) {
        for pages in self.stored.chunks(16) {
            self.space.prefetch(pages.iter().map(|one| one.0));
            for &(slot, seed) in pages {
                assert!(self.load(slot).unwrap() == page(seed), "{slot:?}");
            }
        }
    }
}

/// A server and pages that are all in it, of which none was sent twice, which would leave more keys. On busy CPUs a
/// server may not answer in time: then another one is tried.
pub fn sent_at_once(folder: &Path, pages: u64) -> (StoreServer, World) {
    for _ in 0..3 {
        let server = StoreServer::start(folder, &[]);
        let world = World::new(&options(server.port), pages);
        world.send_all();
        if world.store.tier().usage().store_failures == 0 {
            return (server, world);
        }
    }
    panic!("one of three servers takes all pages at once");
}

/// Waits for other threads.
#[track_caller]
pub fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A certificate authority, and a certificate for 127.0.0.1.
pub fn certificates(folder: &Path) {
    let run = |arguments: &[&str]| {
        let done = std::process::Command::new("openssl")
            .args(arguments)
            .current_dir(folder)
            .output()
            .expect("openssl runs");
        assert!(done.status.success(), "{done:?}");
    };
    let new = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ];
    let request = |name: &'static str, more: &[&'static str]| {
        let mut all = vec!["req", "-x509", "-subj", name];
        all.extend(new);
        all.extend(more);
        run(&all);
    };
    request("/CN=authority", &["-keyout", "ca.key", "-out", "ca.pem"]);
    request(
        "/CN=server",
        &[
            "-keyout",
            "key.pem",
            "-out",
            "cert.pem",
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-addext",
            "basicConstraints=CA:FALSE",
        ],
    );
    request("/CN=other", &["-keyout", "other.key", "-out", "other.pem"]);
}

/// A server that speaks TLS, with what [`certificates`] has left in the folder.
pub fn tls_server(folder: &Path) -> StoreServer {
    let path = |name: &str| folder.join(name).display().to_string();
    StoreServer::start(
        folder,
        &[
            "--tls-port",
            "{port}",
            "--tls-auth-clients",
            "no",
            "--tls-cert-file",
            &path("cert.pem"),
            "--tls-key-file",
            &path("key.pem"),
            "--tls-ca-cert-file",
            &path("ca.pem"),
        ],
    )
}
