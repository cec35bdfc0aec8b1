//! The backend with real servers, alone and in a cluster.

mod support;

use std::time::{Duration, Instant};

use memfold_remote::{OpenError, Options, Password, RemoteStore};
use memfold_swap::{Corruption, LoadError, Slot};
use memfold_testing::skip;
use memfold_testing::store::{
    HOSTS, Network, Passing, Proxy, StoreCluster, StoreServer, free_port, store_programs,
};
use support::{
    Warnings, World, certificates, folder, options, page, sent_at_once, tls_server,
    use_documented_user, wait_until,
};

/// What docs/remote.md has for the servers' configuration is understood by them.
#[test]
fn a_server_starts_with_the_documented_settings() {
    let Some(folder) = folder() else { return };
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/remote.md");
    let page = std::fs::read_to_string(page).expect("the document");
    let mut blocks = page.split("\n```\n");
    let settings = blocks.find(|block| block.starts_with("maxmemory "));
    let path = folder.path().join("settings");
    std::fs::write(&path, settings.expect("the servers' settings")).expect("a file");
    let path = path.display().to_string();
    let bus = free_port().to_string();
    let server = StoreServer::start(folder.path(), &["--include", &path, "--cluster-port", &bus]);
    let policy = server.ask(&["config", "get", "maxmemory-policy"]);
    assert!(policy.contains("noeviction"), "{policy}");
}

#[test]
fn pages_go_to_a_server_and_come_back() {
    let Some(folder) = folder() else { return };
    let (server, world) = sent_at_once(folder.path(), 2000);
    world.assert_all_right();
    let lives: u64 = server
        .ask(&["TTL", &server.ask(&["RANDOMKEY"])])
        .parse()
        .unwrap();
    assert!((3500..=3600).contains(&lives), "{lives}");
    assert_eq!(server.ask(&["DBSIZE"]), "32");
    // What is freed goes.
    let slots: Vec<_> = world.stored.iter().map(|one| one.0).collect();
    world.space.release_bulk(&slots[..1000]);
    wait_until("they are removed", || {
        let left: u64 = server.ask(&["DBSIZE"]).parse().unwrap();
        left <= 17
    });
    drop(world);
    assert_eq!(server.ask(&["DBSIZE"]), "0", "a clean end removes all");
}

#[test]
fn a_server_that_is_slow_full_cut_or_gone_loses_nothing() {
    let Some(folder) = folder() else { return };
    let server = StoreServer::start(folder.path(), &[]);
    let proxy = Proxy::to(server.port);
    let mut world = World::new(&options(proxy.port), 1000);
    world.send_all();
    for passing in [Passing::Held, Passing::Cut] {
        proxy.set(passing);
        world.store_more(300);
        let before = world.space.usage().remote_pages;
        assert_eq!(world.write_back(), before, "nothing is acknowledged");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_secs(3));
                proxy.set(Passing::Free);
            });
            world.assert_all_right();
        });
        std::thread::sleep(Duration::from_secs(1));
        world.write_back();
    }
    assert!(world.store.tier().usage().retries > 0);
    let memory = server.ask(&["CONFIG", "SET", "maxmemory", "1mb"]);
    assert_eq!(memory, "OK");
    world.store_more(300);
    let before = world.space.usage().remote_pages;
    assert_eq!(world.write_back(), before, "the store has no room");
    world.assert_all_right();
    drop(world);
    assert_eq!(server.ask(&["DBSIZE"]), "0");
}

#[test]
fn what_a_server_loses_or_changes_is_refused() {
    let Some(folder) = folder() else { return };
    let (server, world) = sent_at_once(folder.path(), 128);
    let keys = server.ask(&["KEYS", "*"]);
    let keys: Vec<_> = keys.lines().collect();
    assert_eq!(keys.len(), 2);
    // Another page of the same batch, then nothing.
    let moved = server.ask(&[
        "EVAL",
        "redis.call('HSET', KEYS[1], '3', redis.call('HGET', KEYS[1], '4')); return 'done'",
        "1",
        keys[0],
    ]);
    assert_eq!(moved, "done");
    let is_corrupt = |what: Corruption| {
        let failed = |slot: &(Slot, u64)| matches!(world.load(slot.0), Err(LoadError::Corrupt { what: found, .. }) if found == what);
        world.stored.iter().filter(|one| failed(one)).count()
    };
    assert_eq!(is_corrupt(Corruption::Forged), 1);
    server.ask(&["DEL", keys[0]]);
    assert_eq!(is_corrupt(Corruption::Lost), 64);
    server.ask(&["FLUSHALL"]);
    assert_eq!(is_corrupt(Corruption::Lost), 128);
}

#[test]
fn a_server_with_a_log_is_killed_and_has_its_pages_again() {
    let Some(folder) = folder() else { return };
    // Without fsync in the background, it writes to the log before it answers; only then is nothing lost by its end.
    let logs = ["--appendonly", "yes", "--appendfsync", "no"];
    let mut server = StoreServer::start(folder.path(), &logs);
    let mut world = World::new(&options(server.port), 1000);
    world.send_all();
    server.kill();
    let away = Duration::from_secs(2);
    let began = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(away);
            server.restart();
        });
        world.assert_all_right();
    });
    assert!(began.elapsed() >= away, "loads wait for the server");
    assert!(world.store.tier().usage().retries > 0);
    world.store_more(300);
    world.send_all();
    world.assert_all_right();
}

#[test]
fn a_server_that_evicts_is_warned_of_and_what_it_evicts_is_lost() {
    let Some(folder) = folder() else { return };
    let warnings = Warnings::collect();
    let evicts = ["--maxmemory", "5mb", "--maxmemory-policy", "allkeys-random"];
    let server = StoreServer::start(folder.path(), &evicts);
    // About 7 MiB.
    let world = World::new(&options(server.port), 3000);
    let of_server = format!(
        "127.0.0.1:{} evicts keys when it is full (allkeys-random)",
        server.port
    );
    assert_eq!(warnings.with(&of_server), 1);
    world.send_all();
    let mut lost = 0;
    for &(slot, seed) in &world.stored {
        match world.load(slot) {
            Ok(loaded) => assert!(loaded == page(seed), "{slot:?}"),
            Err(LoadError::Corrupt { what, .. }) => {
                assert_eq!(what, Corruption::Lost);
                lost += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!((1..3000).contains(&lost), "{lost} of 3000 are lost");
    assert!(world.store.tier().usage().load_failures >= lost);
}

/// Has a server ask for another password than memfold has, and takes that back while pages are loaded.
fn loads_wait_while_the_password_is_another(server: &StoreServer, password: &str) {
    let mut options = options(server.port);
    options.password = (!password.is_empty()).then(|| Password::new(password.to_owned()));
    let world = World::new(&options, 300);
    world.send_all();
    let as_other = |command: &[&str]| {
        let user = ["-a", "other", "--no-auth-warning"];
        server.ask(&[&user[..], command].concat())
    };
    let set = server.ask(&["CONFIG", "SET", "requirepass", "other"]);
    assert_eq!(set, "OK");
    let killed: u64 = as_other(&["CLIENT", "KILL", "TYPE", "normal"])
        .parse()
        .unwrap();
    assert!(killed > 0);
    let shut_out = Duration::from_secs(2);
    let began = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(shut_out);
            assert_eq!(as_other(&["CONFIG", "SET", "requirepass", password]), "OK");
        });
        world.assert_all_right();
    });
    assert!(began.elapsed() >= shut_out, "loads wait for the password");
    assert_eq!(world.store.tier().usage().load_failures, 0);
}

#[test]
fn loads_wait_while_a_password_is_asked_for_that_memfold_lacks() {
    let Some(folder) = folder() else { return };
    let server = StoreServer::start(folder.path(), &[]);
    loads_wait_while_the_password_is_another(&server, "");
    let server = StoreServer::start(folder.path(), &["--requirepass", "right"]);
    loads_wait_while_the_password_is_another(&server, "right");
}

#[test]
fn users_passwords_and_addresses_are_checked_at_the_start() {
    let Some(folder) = folder() else { return };
    let server = StoreServer::start(folder.path(), &["--requirepass", "right"]);
    let mut options = options(server.port);
    let error = RemoteStore::open(&options).unwrap_err();
    assert!(matches!(error, OpenError::Refused { .. }), "{error}");
    options.password = Some(Password::new("wrong".to_owned()));
    let error = RemoteStore::open(&options).unwrap_err();
    assert!(matches!(error, OpenError::Refused { .. }), "{error}");
    options.password = Some(Password::new("right".to_owned()));
    drop(RemoteStore::open(&options).unwrap());
    options.user = Some("somebody".to_owned());
    let password = options.password.take();
    let error = RemoteStore::open(&options).unwrap_err();
    assert!(matches!(error, OpenError::NoPassword { .. }), "{error}");
    options.password = password;
    server.ask(&[
        "ACL",
        "SETUSER",
        "somebody",
        "on",
        ">right",
        "~memfold:*",
        "+@all",
        "-hset",
    ]);
    let error = RemoteStore::open(&options).unwrap_err();
    assert!(matches!(error, OpenError::Unusable { .. }), "{error}");
    server.ask(&["ACL", "SETUSER", "somebody", "+hset"]);
    drop(RemoteStore::open(&options).unwrap());
    options.replicas = 1;
    let error = RemoteStore::open(&options).unwrap_err();
    assert!(matches!(error, OpenError::TooFewReplicas { .. }), "{error}");
    options.time_to_live = options.patience;
    let error = RemoteStore::open(&options).unwrap_err();
    assert!(matches!(error, OpenError::TimeToLive), "{error}");
    options.patience = Duration::MAX;
    let error = RemoteStore::open(&options).unwrap_err();
    assert!(matches!(error, OpenError::TimeToLive), "{error}");
    options = support::options(1);
    let error = RemoteStore::open(&options).unwrap_err();
    assert!(matches!(error, OpenError::Unreachable { .. }), "{error}");
}

#[test]
fn two_primaries_that_are_no_cluster_are_refused() {
    let Some(folder) = folder() else { return };
    let servers = [(); 2].map(|()| StoreServer::start(folder.path(), &[]));
    let open = |address: String| RemoteStore::open(&Options::new(address.parse().unwrap()));
    let [first, second] = [&servers[0], &servers[1]].map(|server| server.port);
    let both = format!("valkey://127.0.0.1:{first},127.0.0.1:{second}");
    let error = open(both.clone()).unwrap_err();
    assert!(matches!(error, OpenError::NoCluster { .. }), "{error}");
    // By two names it is one server, and a replica may be named.
    drop(open(format!("valkey://127.0.0.1:{first},localhost:{first}")).unwrap());
    let replicates = ["REPLICAOF", "127.0.0.1", &first.to_string()];
    assert_eq!(servers[1].ask(&replicates), "OK");
    drop(open(both).unwrap());
}

#[test]
fn a_store_that_cannot_be_used_keeps_no_page() {
    let Some(folder) = folder() else { return };
    let servers = [StoreServer::start(folder.path(), &[])];
    let mut options = options(servers[0].port);
    use_documented_user(&servers, &mut options);
    for command in ["hmget", "pexpire", "hdel"] {
        let set = |right: &str| {
            let right = format!("{right}{command}");
            servers[0].ask(&["ACL", "SETUSER", "memfold", &right])
        };
        assert_eq!(set("-"), "OK");
        let error = RemoteStore::open(&options).unwrap_err();
        assert!(matches!(error, OpenError::Unusable { .. }), "{error}");
        assert_eq!(servers[0].ask(&["DBSIZE"]), "0", "without {command}");
        assert_eq!(set("+"), "OK");
    }
    drop(RemoteStore::open(&options).unwrap());
}

#[test]
fn tls_is_spoken_and_other_authorities_are_refused() {
    let Some(folder) = folder() else { return };
    certificates(folder.path());
    let server = tls_server(folder.path());
    let address = format!("valkeys://127.0.0.1:{}", server.port);
    let mut options = Options::new(address.parse().unwrap());
    let read = |name: &str| Some(std::fs::read(folder.path().join(name)).unwrap());
    for authority in [None, read("other.pem")] {
        options.ca_certificates = authority;
        let error = RemoteStore::open(&options).unwrap_err();
        assert!(matches!(error, OpenError::Unreachable { .. }), "{error}");
    }
    options.ca_certificates = read("ca.pem");
    let world = World::new(&options, 500);
    world.send_all();
    world.assert_all_right();
    let plain = support::options(server.port);
    assert!(RemoteStore::open(&plain).is_err());
}

#[test]
fn slots_move_to_another_server_while_pages_are_read() {
    let Some(folder) = folder() else { return };
    let cluster = StoreCluster::start(folder.path(), &[]);
    cluster.keep_primaries();
    let mut options = options(cluster.servers[0].port);
    // Nothing that memfold sends is beyond the rights that the document gives it.
    use_documented_user(&cluster.servers, &mut options);
    let mut world = World::new(&options, 3000);
    world.send_all();
    let [mut from, mut to, _] = cluster.primaries()[..] else {
        panic!("three primaries");
    };
    let id = |index: usize| cluster.servers[index].ask(&["CLUSTER", "MYID"]);
    let reshard = |from: usize, to: usize| {
        std::process::Command::new(store_programs()[1])
            .args(["--cluster", "reshard"])
            .arg(format!("127.0.0.1:{}", cluster.servers[from].port))
            .args(["--cluster-from", &id(from), "--cluster-to", &id(to)])
            .args(["--cluster-slots", "500", "--cluster-yes"])
            .stdout(std::process::Stdio::null())
            .spawn()
            .expect("the client runs")
    };
    // Without a CPU, this thread may read nothing while they move: they move back then.
    let mut rounds = 0;
    for _ in 0..10 {
        let mut moving = reshard(from, to);
        while moving.try_wait().expect("it runs").is_none() {
            world.assert_all_right();
            world.store_more(100);
            world.write_back();
            rounds += 1;
        }
        if rounds > 1 {
            break;
        }
        (from, to) = (to, from);
    }
    assert!(rounds > 1, "the slots moved too fast");
    world.assert_all_right();
    // A slot halfway: its keys are redirected one by one.
    let slot_of = |key: &str| cluster.servers[to].ask(&["CLUSTER", "KEYSLOT", key]);
    let keys = cluster.servers[to].ask(&["KEYS", "*"]);
    let slot = slot_of(keys.lines().next().expect("a key"));
    let set = |index: usize, how: &str, other: usize| {
        let id = id(other);
        let done = cluster.servers[index].ask(&["CLUSTER", "SETSLOT", &slot, how, &id]);
        assert_eq!(done, "OK");
    };
    set(from, "IMPORTING", to);
    set(to, "MIGRATING", from);
    for key in keys.lines().filter(|key| slot_of(key) == slot) {
        let port = cluster.servers[from].port.to_string();
        let moved = cluster.servers[to].ask(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]);
        assert_eq!(moved, "OK");
    }
    world.assert_all_right();
    let slots: Vec<_> = world.stored.drain(..).map(|one| one.0).collect();
    world.space.release_bulk(&slots);
    wait_until("all are removed", || {
        world.store.tier().maintain(&|| false) && cluster.keys() == 0
    });
}

#[test]
fn a_primary_that_the_others_have_replaced_is_not_believed() {
    if std::env::var_os("MEMFOLD_TEST_ROUNDS").is_none() {
        println!("left out of the short form: MEMFOLD_TEST_ROUNDS=2 has it");
        return;
    }
    let Some(folder) = folder() else { return };
    if !memfold_testing::is_root() {
        skip("root, to split a network");
        return;
    }
    let network = Network::enter();
    let cluster = StoreCluster::start_at(&HOSTS, folder.path(), &[]);
    let address = format!("valkey://{}:{}", HOSTS[0], cluster.servers[0].port);
    let mut options = Options::new(address.parse().unwrap());
    options.replicas = 1;
    options.patience = Duration::from_secs(15);
    let mut world = World::new(&options, 2000);
    world.send_all();
    // Each in turn, so that the one that is asked first is among them.
    for cut in cluster.primaries() {
        let others: Vec<_> = HOSTS.into_iter().filter(|one| *one != HOSTS[cut]).collect();
        network.split(&[HOSTS[cut]], &others);
        cluster.wait_for_primaries(3, cut);
        // It still answers, and knows nothing of its successor.
        world.assert_all_right();
        world.store_more(300);
        world.send_all();
        world.assert_all_right();
        network.join();
        world.assert_all_right();
        cluster.wait_until_whole();
        world.assert_all_right();
    }
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_cluster_fails_over_and_nothing_that_replicas_have_is_lost() {
    let Some(folder) = folder() else { return };
    let mut cluster = StoreCluster::start(folder.path(), &[]);
    // Any node leads to all.
    let mut options = options(cluster.servers[4].port);
    options.replicas = 1;
    let mut world = World::new(&options, 3000);
    world.send_all();
    let shares: Vec<u64> = cluster
        .primaries()
        .iter()
        .map(|index| cluster.servers[*index].ask(&["DBSIZE"]).parse().unwrap())
        .collect();
    assert!(shares.iter().all(|keys| *keys > 3), "{shares:?}");
    world.assert_all_right();

    let victim = cluster.primaries()[0];
    cluster.servers[victim].kill();
    world.store_more(500);
    world.write_back();
    // The faults wait until a replica has taken over.
    world.assert_all_right();
    cluster.wait_for_primaries(3, victim);
    cluster.servers[victim].restart();
    cluster.wait_until_whole();

    // A primary that hangs, is replaced, and comes back.
    let victim = cluster.primaries()[1];
    cluster.servers[victim].pause(true);
    world.store_more(500);
    world.write_back();
    world.assert_all_right();
    cluster.servers[victim].pause(false);
    cluster.wait_until_whole();
    world.write_back();
    world.assert_all_right();

    // Replicas that are gone acknowledge nothing.
    cluster.keep_primaries();
    let primaries = cluster.primaries();
    let replicas: Vec<_> = (0..6).filter(|one| !primaries.contains(one)).collect();
    replicas.iter().for_each(|one| cluster.servers[*one].kill());
    assert_eq!(cluster.primaries(), primaries, "no replica has taken over");
    world.store_more(500);
    let before = world.space.usage().remote_pages;
    assert_eq!(world.write_back(), before);
    world.assert_all_right();
    let World { space, store, .. } = world;
    drop(space);
    assert!(store.tier().usage().store_failures > 0);
    let within = Duration::from_secs(3);
    assert!(!store.tier().clear(within), "no replica has removed them");
    assert_eq!(cluster.keys(), 0);
}
