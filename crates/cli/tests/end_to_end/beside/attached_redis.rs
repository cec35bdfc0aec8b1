//! A database that runs already: attached and let go again and again, under load, with snapshots by a forked child.

use super::attach::{assert_ended_well, attach_under, detach, status, text, wait_until};
use crate::support::{RedisClient, later_value, redis_value, rounds, short_or_long};
use std::path::Path;
use std::process::{Child, Command, Stdio};

const KEYS: usize = 30_000;
/// Of those, what is written while a snapshot is made.
const CHANGED: usize = KEYS / 3;

/// A server without memfold.
struct Server {
    process: Child,
    port: u16,
}

impl Server {
    fn start(folder: &Path) -> (Server, RedisClient) {
        let port = memfold_testing::store::free_port();
        let server = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly", "no", "--dir"])
            .arg(folder)
            .stdout(Stdio::null())
            .spawn();
        let process = server.expect("it starts");
        let server = Server { process, port };
        let client = RedisClient::connect(port);
        (server, client.expect("the server answers"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Fifty clients that write other keys all the time.
struct Load(Child);

impl Load {
    fn on(server: &Server) -> Load {
        let port = server.port.to_string();
        let load = Command::new("redis-benchmark")
            .args(["-p", &port, "-r", "20000", "-l", "-q"])
            .args(["set", "load:__rand_int__", &"x".repeat(500)])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Load(load.expect("it starts"))
    }

    /// It has had answers to all that it asked.
    fn assert_goes_on(&mut self) {
        assert_eq!(self.0.try_wait().expect("a status"), None);
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A snapshot of this moment, although all that is written changes meanwhile.
fn save_and_change(client: &mut RedisClient, after: fn(usize) -> Vec<u8>) {
    client.command(&[b"BGSAVE"]);
    client.fill(0..CHANGED, after);
    client.verify("during a snapshot", CHANGED..KEYS, redis_value);
    wait_until("the snapshot ends", || {
        client.info("rdb_bgsave_in_progress") == "0"
    });
    assert_eq!(client.info("rdb_last_bgsave_status"), "ok");
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn redis_saves_in_the_background_while_it_is_attached() {
    beside!(&["redis-server", "redis-benchmark"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let (server, mut client) = Server::start(folder.path());
    client.fill(0..KEYS, redis_value);
    let mut load = Load::on(&server);
    let values: [fn(usize) -> Vec<u8>; 2] = [redis_value, later_value];
    for cycle in 0..short_or_long(2, (5 * rounds() as usize).min(100)) {
        let attach = attach_under("16M", server.process.id());
        let pid = server.process.id();
        wait_until("it is under the limit", || {
            status(pid, "RssAnon") < 20 << 10
        });
        let (before, after) = (values[cycle % 2], values[(cycle + 1) % 2]);
        client.verify("attached", 0..CHANGED, before);
        save_and_change(&mut client, after);
        client.verify("changed", 0..CHANGED, after);
        let detached = detach(server.process.id());
        assert_eq!(
            detached.status.code(),
            Some(0),
            "{}",
            text(&detached.stderr)
        );
        assert_ended_well(attach);
        load.assert_goes_on();
        // What was saved, loaded by a server without a limit.
        if cycle % 10 == 1 {
            let (_loaded, mut client) = Server::start(folder.path());
            client.verify("loaded, of the moment of the snapshot", 0..CHANGED, before);
            client.verify("loaded", CHANGED..KEYS, redis_value);
        }
    }
    client.verify("in the end", CHANGED..KEYS, redis_value);
}
