//! redis-server with most of its data out: every key read back, also around BGSAVE.

use crate::support::{
    Limits, MIB, Program, RedisClient, Running, later_value, redis_value, short_or_long,
};
use std::path::Path;
use std::time::{Duration, Instant};

const KEYS: usize = 60_000;

fn server(folder: &Path, port: u16, limits: Limits) -> (Running, RedisClient) {
    let program = Program::new("redis-server")
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
        .args(["--save", "", "--appendonly", "no", "--dir"])
        .arg(folder)
        .timeout(Duration::from_secs(240));
    let mut running = program.start(limits);
    match RedisClient::connect(port) {
        Some(client) => (running, client),
        None => running.give_up("the server does not answer"),
    }
}

#[test]
fn redis_keeps_every_key_during_and_after_a_background_save() {
    alone!(&["redis-server"]);
    let limits = [Limits::Total(100 * MIB), Limits::Resident(30 * MIB)];
    for limits in limits.into_iter().take(short_or_long(1, 2)) {
        fill_save_and_compare(limits);
    }
}

fn fill_save_and_compare(limits: Limits) {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let (mut running, mut client) =
        server(folder.path(), memfold_testing::store::free_port(), limits);
    client.fill(0..KEYS, redis_value);
    client.verify("filled", 0..KEYS, redis_value);

    // BGSAVE forks while most of the data is out.  The snapshot must be the data of
    // this moment, although the parent changes a third of the keys meanwhile.
    client.command(&[b"BGSAVE"]);
    client.fill(0..KEYS / 3, later_value);
    client.verify("changed during BGSAVE", 0..KEYS / 3, later_value);
    client.verify("during BGSAVE", KEYS / 3..KEYS, redis_value);
    let deadline = Instant::now() + Duration::from_secs(120);
    while client.info("rdb_bgsave_in_progress") != "0" {
        if Instant::now() > deadline {
            running.give_up("BGSAVE does not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(client.info("rdb_last_bgsave_status"), "ok");
    client.verify("changed, after BGSAVE", 0..KEYS / 3, later_value);
    client.verify("after BGSAVE", KEYS / 3..KEYS, redis_value);
    client.shut_down();
    let outcome = running.wait();
    outcome.assert_success();
    outcome.assert_swapped(100 * MIB);
    outcome.assert_limit_held();

    // The dump, loaded by a server without a limit.
    let (running, mut client) = server(
        folder.path(),
        memfold_testing::store::free_port(),
        Limits::None,
    );
    client.verify("loaded from the dump", 0..KEYS, redis_value);
    client.shut_down();
    running.wait().assert_success();
}
