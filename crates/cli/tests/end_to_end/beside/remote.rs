//! Pages in a store on other machines: whatever the store does, a program reads what it wrote, waits, or
//! is stopped.

use crate::beside::crash::{send, verifier};
use crate::beside::tiers::{assert_empty, with_file};
use crate::support::{
    Limits, MIB, Outcome, Program, Running, compiled, memfold, rounds, short_or_long,
};
use memfold_testing::store::{
    HOSTS, Network, Passing, Proxy, StoreCluster, StoreServer, store_programs,
};
use nix::sys::signal::Signal;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// What these tests need.
fn tools() -> [&'static str; 3] {
    let [server, client] = store_programs();
    ["cc", server, client]
}

/// A program that verifies 64 MiB, under a limit far below.
const LIMIT: Limits = Limits::Total(24 * MIB);

fn with_store(program: Program, ports: &[u16]) -> Program {
    let servers: Vec<_> = ports
        .iter()
        .map(|port| format!("127.0.0.1:{port}"))
        .collect();
    program.memfold_options([
        "--remote".to_owned(),
        format!("valkey://{}", servers.join(",")),
    ])
}

fn number(run: &Running, name: &str) -> u64 {
    run.statistics()[name].as_u64().expect("a number")
}

/// Waits until the program has gone on for some rounds, each of which touches all of its memory.
fn go_on(run: &mut Running, rounds: usize) {
    let before = run.output_so_far().len();
    run.wait_for_output(before + rounds);
}

/// Ends a program that runs for ever, which must have found no wrong page.
fn end(run: Running, result: &Path) -> Outcome {
    send(Signal::SIGTERM, run.root());
    let outcome = run.wait();
    assert_eq!(
        outcome.code(),
        128 + Signal::SIGTERM as i32,
        "{}",
        outcome.errors
    );
    assert_right(result);
    outcome
}

#[track_caller]
fn assert_right(result: &Path) {
    assert_eq!(fs::read_to_string(result).expect("the result"), "");
}

#[test]
fn remote_pages_survive_a_cluster_whose_servers_are_killed_paused_and_failed_over() {
    only_in_the_long_form!();
    beside!(&tools());
    let folder = tempfile::tempdir().expect("a temporary directory");
    let mut cluster = StoreCluster::start(folder.path(), &[]);
    let result = folder.path().join("result");
    // Any of its servers leads to all.
    let program = with_store(verifier(&result), &[cluster.servers[5].port])
        .memfold_options(["--remote-replicas", "1"])
        .timeout(patience());
    let mut run = program.start(LIMIT);
    go_on(&mut run, 2);
    assert!(number(&run, "remote_bytes") > MIB);
    for round in 0..short_or_long(1, rounds()) {
        let killed = cluster.primaries()[0];
        cluster.servers[killed].kill();
        cluster.wait_for_primaries(3, killed);
        go_on(&mut run, 2);
        cluster.servers[killed].restart();
        cluster.wait_until_whole();
        go_on(&mut run, 1);

        let paused = cluster.primaries()[1];
        cluster.servers[paused].pause(true);
        cluster.wait_for_primaries(3, paused);
        go_on(&mut run, 2);
        cluster.servers[paused].pause(false);
        cluster.wait_until_whole();
        go_on(&mut run, 1);

        // Without its replicas the cluster takes no page, and returns what it has.
        let primaries = cluster.primaries();
        let replicas: Vec<_> = (0..6).filter(|one| !primaries.contains(one)).collect();
        replicas.iter().for_each(|one| cluster.servers[*one].kill());
        go_on(&mut run, 1);
        replicas
            .iter()
            .for_each(|one| cluster.servers[*one].restart());
        cluster.wait_until_whole();
        go_on(&mut run, 1);
        eprintln!("round {round}: {:#}", run.statistics()["remote_retries"]);
    }
    let outcome = end(run, &result);
    assert!(outcome.number("remote_pages_in") > 10_000.0);
    assert!(outcome.number("remote_failures") > 0.0);
    assert_eq!(outcome.number("remote_lost_pages"), 0.0);
    let warned = |text: &str| outcome.errors.matches(text).count();
    assert_eq!(
        warned("takes no more pages for now"),
        1,
        "{}",
        outcome.errors
    );
    assert_eq!(cluster.keys(), 0, "a clean end leaves nothing");
}

/// Time-out of a run, which grows with its rounds.
fn patience() -> Duration {
    Duration::from_secs(180) + Duration::from_secs(120) * rounds()
}

/// Where memfold connects from.
const CLIENT: &str = "127.0.0.1";

#[test]
fn remote_pages_survive_a_network_that_splits() {
    only_in_the_long_form!();
    let [cc, server, client] = tools();
    beside!(&[cc, server, client, "unshare", "ip", "iptables"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let network = Network::enter();
    let cluster = StoreCluster::start_at(&HOSTS, folder.path(), &[]);
    let result = folder.path().join("result");
    let address = format!("valkey://{}:{}", HOSTS[0], cluster.servers[0].port);
    let program =
        verifier(&result).memfold_options(["--remote", &address, "--remote-replicas", "1"]);
    let mut run = program.start(LIMIT);
    go_on(&mut run, 2);
    assert!(number(&run, "remote_bytes") > MIB);
    for round in 0..short_or_long(1, rounds()) as usize {
        // memfold alone does not reach a primary.
        let cut = HOSTS[cluster.primaries()[round % 3]];
        network.split(&[CLIENT], &[cut]);
        std::thread::sleep(Duration::from_secs(4));
        network.join();
        go_on(&mut run, 2);

        // A primary reaches memfold, and no other server: its replica takes over while it still answers.
        let cut = cluster.primaries()[(round + 1) % 3];
        let others: Vec<_> = HOSTS.into_iter().filter(|one| *one != HOSTS[cut]).collect();
        network.split(&[HOSTS[cut]], &others);
        cluster.wait_for_primaries(3, cut);
        go_on(&mut run, 2);
        network.join();
        cluster.wait_until_whole();
        go_on(&mut run, 1);

        // memfold is on the side of one primary, without the rest.
        let cut = cluster.primaries()[(round + 2) % 3];
        let others: Vec<_> = HOSTS.into_iter().filter(|one| *one != HOSTS[cut]).collect();
        network.split(&[CLIENT, HOSTS[cut]], &others);
        std::thread::sleep(Duration::from_secs(5));
        network.join();
        cluster.wait_until_whole();
        go_on(&mut run, 2);
        eprintln!("round {round}: {:#}", run.statistics()["remote_retries"]);
    }
    let outcome = end(run, &result);
    assert!(outcome.number("remote_pages_in") > 10_000.0);
    assert!(outcome.number("remote_retries") > 0.0);
    assert_eq!(outcome.number("remote_lost_pages"), 0.0);
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_store_that_is_slow_cut_off_forging_or_full_delays_and_loses_nothing() {
    beside!(&tools());
    let folder = tempfile::tempdir().expect("a temporary directory");
    let server = StoreServer::start(folder.path(), &[]);
    let proxy = Proxy::to(server.port);
    let result = folder.path().join("result");
    let program = with_store(verifier(&result), &[proxy.port]).timeout(patience());
    let mut run = program.start(LIMIT);
    go_on(&mut run, 1);
    for passing in [
        Passing::Held,
        Passing::Cut,
        Passing::Dripping,
        Passing::Huge,
    ] {
        proxy.set(passing);
        std::thread::sleep(Duration::from_secs(4));
        proxy.set(Passing::Free);
        go_on(&mut run, 2);
    }
    assert_eq!(server.ask(&["CONFIG", "SET", "maxmemory", "2mb"]), "OK");
    go_on(&mut run, 2);
    assert_eq!(server.ask(&["CONFIG", "SET", "maxmemory", "0"]), "OK");
    go_on(&mut run, 2);
    let outcome = end(run, &result);
    assert!(outcome.number("remote_retries") > 0.0);
    assert!(outcome.number("remote_failures") > 0.0);
    for warning in ["takes no more pages for now", "does not return pages"] {
        let given = outcome.errors.matches(warning).count();
        assert_eq!(given, 1, "{}", outcome.errors);
    }
    // Writes that were cut off may leave a few keys, which expire.
    let left = server.ask(&["KEYS", "*"]);
    let left: Vec<&str> = left.lines().filter(|key| !key.is_empty()).collect();
    assert!(left.len() <= 8, "{left:?}");
    for key in left {
        let expires: i64 = server.ask(&["PTTL", key]).parse().expect("a time");
        assert!(expires > 0, "{key} stays for ever");
    }
}

/// Runs the verifier until it is killed because of what happens to the store.
fn must_be_stopped(program: &Program, result: &Path, happens: impl FnOnce()) -> Outcome {
    let mut run = program.start(LIMIT);
    go_on(&mut run, 1);
    happens();
    let began = Instant::now();
    while !run.has_ended() {
        if began.elapsed() > Duration::from_secs(60) {
            run.give_up("it runs on without its pages");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let outcome = run.wait();
    assert_eq!(
        outcome.code(),
        128 + Signal::SIGKILL as i32,
        "{}",
        outcome.errors
    );
    assert!(
        outcome.errors.contains("cannot be read back"),
        "{}",
        outcome.errors
    );
    assert_right(result);
    outcome
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_program_is_stopped_where_the_store_lost_changed_or_never_returns_its_pages() {
    beside!(&tools());
    let folder = tempfile::tempdir().expect("a temporary directory");
    let server = StoreServer::start(folder.path(), &[]);
    let result = folder.path().join("result");
    let program = with_store(verifier(&result), &[server.port]);
    let outcome = must_be_stopped(&program, &result, || {
        assert_eq!(server.ask(&["FLUSHALL"]), "OK");
    });
    assert!(
        outcome.errors.contains("the store has lost it"),
        "{}",
        outcome.errors
    );

    // Each page becomes the one behind it.
    let script = "for _, key in ipairs(redis.call('KEYS', 'memfold:*')) do \
                  local all = redis.call('HGETALL', key) \
                  for i = 1, #all - 3, 2 do redis.call('HSET', key, all[i], all[i + 3]) end end \
                  return 'done'";
    let outcome = must_be_stopped(&program, &result, || {
        assert_eq!(server.ask(&["EVAL", script, "0"]), "done");
    });
    let why = "damaged, outdated or forged";
    assert!(outcome.errors.contains(why), "{}", outcome.errors);

    let program = program.memfold_options(["--remote-timeout", "2s", "--remote-ttl", "10s"]);
    let outcome = must_be_stopped(&program, &result, || server.pause(true));
    let why = "did not answer in time";
    assert!(outcome.errors.contains(why), "{}", outcome.errors);
    server.pause(false);
    // What could not be removed is forgotten.
    expires(&server);
}

#[test]
fn copies_in_the_swap_file_outlive_the_store() {
    beside!(&tools());
    let folder = tempfile::tempdir().expect("a temporary directory");
    let (files, result) = (folder.path().join("swap"), folder.path().join("result"));
    fs::create_dir(&files).expect("a folder");
    let mut server = StoreServer::start(folder.path(), &[]);
    let program = with_store(verifier(&result), &[server.port]);
    let program = with_file(program, &files, "256M").memfold_options(["--remote-keep-copy"]);
    let mut run = program.start(LIMIT);
    go_on(&mut run, 2);
    assert!(number(&run, "remote_bytes") > MIB);
    server.kill();
    go_on(&mut run, 3);
    let outcome = end(run, &result);
    assert!(outcome.number("remote_copies_read") > 0.0);
    assert_empty(&files);
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_killed_run_leaves_nothing_in_the_store_for_long() {
    beside!(&tools());
    let folder = tempfile::tempdir().expect("a temporary directory");
    let server = StoreServer::start(folder.path(), &[]);
    let result = folder.path().join("result");
    let program = with_store(verifier(&result), &[server.port]).memfold_options([
        "--remote-ttl",
        "10s",
        "--remote-timeout",
        "5s",
    ]);
    let mut run = program.start(LIMIT);
    go_on(&mut run, 1);
    // Renewed, pages outlive the time to live.
    std::thread::sleep(Duration::from_secs(12));
    go_on(&mut run, 2);
    send(Signal::SIGKILL, run.root());
    run.wait();
    assert_right(&result);
    assert_ne!(server.ask(&["DBSIZE"]), "0");
    expires(&server);
}

/// Waits until a store has nothing any more, as the time to live that was set is far shorter than this takes at most.
fn expires(server: &StoreServer) {
    const LONGEST: Duration = Duration::from_secs(60);
    let began = Instant::now();
    while server.ask(&["DBSIZE"]) != "0" {
        assert!(began.elapsed() < LONGEST, "the store has pages yet");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_swapoff_brings_remote_pages_back() {
    beside!(&tools());
    let folder = tempfile::tempdir().expect("a temporary directory");
    let server = StoreServer::start(folder.path(), &[]);
    let program = Program::new(compiled("patient", &["patient.c"], &[]))
        .args(["64"])
        .arg(folder.path().join("go"));
    let mut run = with_store(program, &[server.port])
        .memfold_options(["--writeback-after", "2s"])
        .start(Limits::Resident(24 * MIB));
    run.wait_for_output(1);
    // A sample taken while pages are on their way may have them in one of the two alone.
    let began = Instant::now();
    loop {
        let now = run.statistics();
        let remote = now["remote_bytes"].as_u64().expect("a number");
        if remote > MIB && now["programs"][0]["remote_bytes"] == remote {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{now:#}");
        std::thread::sleep(Duration::from_millis(100));
    }
    let output = Command::new(memfold())
        .args(["swapoff", &run.root().to_string()])
        .output()
        .expect("memfold swapoff runs");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(number(&run, "remote_bytes"), 0);
    fs::write(folder.path().join("go"), "").expect("the sign to go on");
    run.wait().assert_success();
}

#[test]
fn secrets_come_from_files_or_the_environment_and_reach_no_program() {
    beside!(&tools());
    let folder = tempfile::tempdir().expect("a temporary directory");
    let server = StoreServer::start(folder.path(), &["--requirepass", "open-sesame"]);
    let show = with_store(Program::new("env"), &[server.port]);
    let refused = show
        .clone()
        .env("MEMFOLD_REMOTE_PASSWORD", "wrong")
        .run(LIMIT);
    assert_eq!(refused.code(), 125, "{}", refused.errors);
    let said = refused.errors.trim();
    assert!(said.contains("refuses the user or password"), "{said}");
    assert_eq!(
        (said.lines().count(), said.contains("wrong\n")),
        (1, false),
        "{said}"
    );
    let shown = show
        .clone()
        .env("MEMFOLD_REMOTE_PASSWORD", "open-sesame")
        .run(LIMIT);
    shown.assert_success();
    assert!(!shown.text().contains("sesame"), "{}", shown.text());
    let file = folder.path().join("password");
    fs::write(&file, "default\nopen-sesame\n").expect("a file");
    let shown = show
        .memfold_options([Path::new("--remote-password-file"), &file])
        .run(LIMIT);
    shown.assert_success();
    let in_argv = Program::new("true")
        .memfold_options(["--remote", "valkey://me:secret@127.0.0.1"])
        .run(LIMIT);
    assert!(
        in_argv.errors.contains("must not be in the address"),
        "{}",
        in_argv.errors
    );
}
