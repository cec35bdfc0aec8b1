//! Which processes memfold admits, and what others gain by trying: another user's outside of the run, a
//! program of the run that became another user's, and a process that listens where memfold did.

use crate::support::{Limits, MIB, Program, Running, compiled, copy_program, memfold};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Limits = Limits::Resident(16 * MIB);

fn uninvited() -> PathBuf {
    compiled("uninvited", &["uninvited.c"], &[])
}

/// A program of another user than root's, outside of every run.
fn as_nobody(program: impl AsRef<Path>) -> Command {
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
        .arg(program.as_ref());
    command
}

/// The abstract name at which a run listens for helpers, as any user can read it.
fn control_name(running: &mut Running) -> String {
    let preload = fs::read(format!("/proc/{}/environ", running.program())).expect("environ");
    let preload = preload
        .split(|byte| *byte == 0)
        .find_map(|one| one.strip_prefix(b"LD_PRELOAD="))
        .expect("the program has the library");
    let preload = String::from_utf8_lossy(preload).into_owned();
    let folder = Path::new(&preload).parent().expect("it is in a folder");
    let name = folder.join("control").display().to_string();
    let sockets = fs::read_to_string("/proc/net/unix").expect("the list of sockets");
    assert!(sockets.contains(&format!("@{name}")), "anybody knows it");
    name
}

/// A copy where other users may execute it.
pub fn public_copy(program: &Path, folder: &Path) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let copy = folder.join("public");
    copy_program(program, &copy);
    for path in [folder, &copy] {
        let everybody = fs::Permissions::from_mode(0o755);
        fs::set_permissions(path, everybody).expect("permissions");
    }
    copy
}

#[test]
fn uninvited_peers_are_hung_up_on_and_delay_no_admission() {
    beside!(&["cc", "setpriv", "sh"]);
    let folder = tempfile::tempdir_in("/tmp").expect("a folder");
    let program = public_copy(&uninvited(), folder.path());
    let script =
        "echo started; read line < \"$0\"; for i in 1 2 3 4 5; do /bin/true; done; echo ended";
    let wait = folder.path().join("wait");
    let made = Command::new("mkfifo").arg(&wait).status();
    assert!(made.expect("mkfifo runs").success());
    let mut running = Program::new("sh")
        .args(["-c", script])
        .arg(&wait)
        .timeout(Duration::from_secs(60))
        .start(LIMIT);
    running.wait_for_output(8);
    let name = control_name(&mut running);
    let mut knocking = as_nobody(&program);
    knocking.args(["knock", &name, "3000"]);
    let knocks = knocking.output().expect("it runs");
    let said = String::from_utf8_lossy(&knocks.stdout).into_owned();
    assert_eq!(said, "connected 3000, hung up on 3000\n");
    // Programs start while others go on knocking.
    let mut floods: Vec<Child> = (0..2)
        .map(|_| as_nobody(&program).args(["flood", &name, "600"]).spawn())
        .collect::<Result<_, _>>()
        .expect("they run");
    std::thread::sleep(Duration::from_millis(500));
    fs::write(&wait, "on\n").expect("the program is waiting");
    let began = Instant::now();
    let outcome = running.wait();
    let took = began.elapsed().saturating_sub(outcome.pause);
    let go_on = |flood: &mut Child| flood.try_wait().expect("wait").is_none();
    let all_went_on = floods.iter_mut().all(go_on);
    for mut flood in floods {
        flood.kill().expect("it is killed");
        flood.wait().expect("it ends");
    }
    assert!(took < Duration::from_secs(40), "programs waited: {took:?}");
    assert!(all_went_on, "nobody knocked any more");
    outcome.assert_success();
    assert_eq!(outcome.text(), "started\nended\n");
    assert!(outcome.number("connections_refused") >= 3000.0);
    assert!(outcome.errors.lines().count() < 5, "{}", outcome.errors);
}

#[test]
fn a_silent_program_delays_no_admission() {
    beside!(&["cc", "sh"]);
    let script =
        "\"$0\" hold 900 & sleep 1; for i in 1 2 3 4 5; do /bin/true; done; kill $!; echo ended";
    let outcome = Program::new("sh")
        .args(["-c", script])
        .arg(uninvited())
        .timeout(Duration::from_secs(30))
        .run(LIMIT);
    outcome.assert_success();
    assert_eq!(outcome.text(), "holds 1\nended\n");
    assert!(outcome.number("processes") >= 7.0, "{}", outcome.errors);
    assert!(outcome.errors.lines().count() < 20, "{}", outcome.errors);
}

/// Descriptors that take a minute to close are sent by a program of the run, and by processes outside of it: of memfold's
/// own user by the path, of another one by the abstract name.
#[test]
fn descriptors_that_take_long_to_close_delay_no_admission() {
    beside!(&["cc", "setpriv", "sh"]);
    let folder = tempfile::tempdir_in("/tmp").expect("a folder");
    let program = public_copy(&uninvited(), folder.path());
    let wait = folder.path().join("wait");
    let made = Command::new("mkfifo").arg(&wait).status();
    assert!(made.expect("mkfifo runs").success());
    let script = "\"$0\" linger - 12 & read line < \"$1\"; \
         for i in 1 2 3 4 5; do /bin/true; done; kill $!; echo ended";
    let mut running = Program::new("sh")
        .args(["-c", script])
        .arg(uninvited())
        .arg(&wait)
        .timeout(Duration::from_secs(30))
        .start(LIMIT);
    running.wait_for_output("sent some\n".len());
    let name = control_name(&mut running);
    let own_user = Command::new(&program);
    let strangers = [own_user, as_nobody(&program)].map(|mut command| {
        let command = command.args(["linger", &name, "12"]).stdout(Stdio::piped());
        let mut stranger = command.spawn().expect("it runs");
        let mut said = [0; 10];
        let mut output = stranger.stdout.take().expect("its output");
        output.read_exact(&mut said).expect("it speaks");
        (stranger, String::from_utf8_lossy(&said).into_owned())
    });
    fs::write(&wait, "on\n").expect("the program is waiting");
    let began = Instant::now();
    let outcome = running.wait();
    let took = began.elapsed().saturating_sub(outcome.pause);
    for (mut stranger, said) in strangers {
        stranger.kill().expect("it is killed");
        stranger.wait().expect("it ends");
        assert!(said.starts_with("sent "), "{said}");
    }
    outcome.assert_success();
    assert_eq!(outcome.text(), "sent some\nended\n");
    assert!(took < Duration::from_secs(10), "programs waited: {took:?}");
    assert!(outcome.number("processes") >= 6.0, "{}", outcome.errors);
    assert!(outcome.errors.lines().count() < 30, "{}", outcome.errors);
}

/// With more of them than memfold keeps, programs are not admitted, but do not wait.
#[test]
fn too_many_descriptors_that_take_long_to_close_leave_programs_unmanaged() {
    beside!(&["cc", "sh", "mkfifo"]);
    let folder = tempfile::tempdir_in("/tmp").expect("a folder");
    let script = "mkfifo \"$1\"; \"$0\" linger - 100 > \"$1\" & read line < \"$1\"; /bin/true; kill $!; \
         echo $line, ended";
    let outcome = Program::new("sh")
        .args(["-c", script])
        .arg(uninvited())
        .arg(folder.path().join("said"))
        .timeout(Duration::from_secs(30))
        .run(LIMIT);
    outcome.assert_success();
    assert_eq!(outcome.text(), "sent some, ended\n");
    let refused = outcome.number("connections_refused");
    assert!(refused >= 20.0, "{refused}: {}", outcome.errors);
}

fn says(arguments: &[&str], answer: &str) -> String {
    let outcome = Program::new(uninvited())
        .args(arguments)
        .timeout(Duration::from_secs(60))
        .run(LIMIT);
    outcome.assert_success();
    assert_eq!(outcome.text(), answer, "{}", outcome.errors);
    assert!(outcome.errors.lines().count() < 20, "{}", outcome.errors);
    outcome.errors
}

fn is_refused(arguments: &[&str]) {
    beside!(&["cc"]);
    let errors = says(arguments, "not welcomed\n");
    assert!(
        !errors.contains("its helper"),
        "what it says is unsound: {errors}"
    );
}

/// Otherwise the tests below show nothing.
#[test]
fn a_hello_that_is_true_is_welcomed() {
    beside!(&["cc"]);
    says(&["sound"], "welcomed\n");
}

/// Else its process counts as managed, and is given no helper later.
#[test]
fn nothing_is_kept_of_a_helper_that_left_before_its_welcome() {
    const HELLOS: u64 = 2;
    const PATIENCE: Duration = Duration::from_secs(5);
    beside!(&["cc"]);
    let mut running = Program::new(uninvited())
        .args(["leave"])
        .timeout(Duration::from_secs(60))
        .start(LIMIT);
    running.wait_for_output("left\n".len());
    let began = Instant::now();
    loop {
        let now = running.statistics();
        let came = now["processes"].as_u64().expect("a number");
        let held = now["programs"].as_array().expect("a list").len();
        // The program's own helper may have come.
        if came >= HELLOS && held <= 1 {
            break;
        }
        assert!(began.elapsed() < PATIENCE, "{came} came, {held} are held");
        std::thread::sleep(Duration::from_millis(50));
    }
    running.wait_for_error("runs unmanaged");
    drop(running.terminate());
}

#[test]
fn anothers_userfaultfd_opens_no_process() {
    is_refused(&["foreign"]);
}

#[test]
fn what_a_fork_shares_is_not_given_to_who_claims_it() {
    is_refused(&["claim", "32"]);
}

#[test]
fn a_hello_that_cannot_be_true_is_refused() {
    beside!(&["cc"]);
    says(&["rubbish"], "not welcomed\n");
}

/// Listens at an abstract name as another user, and says what the first that connects sends.
const LISTEN: &str = "
import socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(b'\\0' + sys.argv[1].encode().ljust(107, b'\\0'))
listener.listen()
print('listens', flush=True)
listener.settimeout(10)
connection, _ = listener.accept()
message, descriptors, _, _ = socket.recv_fds(connection, 1000, 4)
print(len(message), 'bytes,', len(descriptors), 'descriptors', flush=True)
";

#[test]
fn nothing_is_sent_to_who_listens_in_memfolds_place() {
    beside!(&["sh", "python3", "setpriv"]);
    let folder = tempfile::tempdir_in("/tmp").expect("a folder");
    let library = folder.path().join("library.so");
    // What a process has that outlives memfold.
    let script = "cp \"$LD_PRELOAD\" \"$0\"; echo \"${LD_PRELOAD%/*}/control\"";
    let run = Command::new(memfold())
        .args(["run", "--limit", "64M", "--quiet", "--", "sh", "-c", script])
        .arg(&library)
        .output()
        .expect("memfold runs");
    let name = String::from_utf8_lossy(&run.stdout).trim().to_owned();
    assert!(library.exists() && name.ends_with("/control"), "{name}");
    let mut squatter = Command::new("setpriv")
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
        .args(["/usr/bin/env", "python3", "-c", LISTEN, &name])
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut said = String::new();
    let mut output = squatter.stdout.take().expect("its output");
    let mut byte = [0];
    while !said.ends_with('\n') && output.read(&mut byte).expect("it speaks") == 1 {
        said.push(byte[0].into());
    }
    assert_eq!(said, "listens\n");
    let status = Command::new("/bin/true")
        .env("LD_PRELOAD", &library)
        .status()
        .expect("it runs");
    assert!(status.success());
    said.clear();
    output.read_to_string(&mut said).expect("it speaks");
    squatter.wait().expect("it ends");
    assert_eq!(said, "0 bytes, 0 descriptors\n");
}
