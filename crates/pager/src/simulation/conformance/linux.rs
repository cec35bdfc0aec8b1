//! The steps of a history on Linux: a program with its children, and memfold's own calls to the kernel.

use crate::simulation::conformance::ask::ask;
use crate::simulation::conformance::facts::{Answer, Blocked, Facts};
use crate::simulation::conformance::operation::{
    Call, FIRST_CHILD_THREAD, HELPER, Operation, PROCESSES, Request, THREADS, arena,
    first_thread_of, process_of,
};
use crate::simulation::conformance::program::{ThreadSlot, Words, answer, begin_program, words_of};
use crate::supervised::kernel::linux::{FEATURES, FEATURES_WITHOUT_FORKS, Userfaultfd};
use crate::supervised::kernel::{Memory, Message};
use memfold_sys::memory::Mapping;
use memfold_sys::process::{Inspector, Process};
use memfold_sys::{Errno, owned_uffd, raw};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdGetfdFlags, WaitOptions, pidfd_getfd, waitpid};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longest time in which a thread answers or waits in the kernel.
const PATIENCE: Duration = Duration::from_secs(20);
/// Where a thread sleeps that waits for a page.
const FAULT_CHANNEL: &str = "handle_userfault";
/// Where a thread sleeps that waits until its event is read.
const EVENT_CHANNELS: [&str; 2] = ["userfaultfd", "fctx"];
/// Bytes of each stack.
const STACK_BYTES: usize = 1 << 16;

struct Thread {
    /// Our end of its socket.
    socket: OwnedFd,
    tid: u32,
    /// Where the kernel tells what it waits in.
    channel: Option<File>,
    /// What it was told last.
    told: Option<Call>,
    is_busy: bool,
}

impl Thread {
    fn tell(&mut self, call: Call) -> io::Result<()> {
        self.told = Some(call);
        self.is_busy = true;
        let bytes: Vec<u8> = words_of(call)
            .iter()
            .flat_map(|word| word.to_ne_bytes())
            .collect();
        rustix::net::send(&self.socket, &bytes, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Its next message, if one comes in time.
    fn answer(&self, patience: Duration) -> io::Result<Option<Words>> {
        let mut descriptors = [PollFd::new(&self.socket, PollFlags::IN)];
        let timeout = Timespec::try_from(patience).map_err(|_| io::ErrorKind::InvalidInput)?;
        if poll(&mut descriptors, Some(&timeout))? == 0 {
            return Ok(None);
        }
        let mut bytes = [0; size_of::<Words>()];
        let (read, _) = rustix::net::recv(&self.socket, &mut bytes, RecvFlags::empty())?;
        if read != bytes.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let word = |index: usize| {
            let word = &bytes[index * 8..][..8];
            u64::from_ne_bytes(word.try_into().expect("eight bytes"))
        };
        Ok(Some(std::array::from_fn(word)))
    }

    /// Its answer, or what it waits in.
    ///
    /// The kernel names the function that a thread sleeps in only while it sleeps, and has noted that it is
    /// awake before what woke it returns. So there is no moment at which this is wrong.
    fn settle(&self) -> Result<Words, Blocked> {
        const SHORT: Duration = Duration::from_micros(30);
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            if let Some(words) = self.answer(SHORT).expect("a program that lives") {
                return Ok(words);
            }
            let channel = self.channel().expect("a thread that lives");
            if channel.contains(FAULT_CHANNEL) {
                return Err(Blocked::Fault);
            }
            if EVENT_CHANNELS.iter().any(|name| channel.contains(name)) {
                return Err(Blocked::Event);
            }
        }
        panic!("thread {} waits in {:?}", self.tid, self.channel());
    }

    /// The function of the kernel that it sleeps in.
    fn channel(&self) -> io::Result<String> {
        let mut name = [0; 64];
        let file = self.channel.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let length = file.read_at(&mut name, 0)?;
        Ok(String::from_utf8_lossy(&name[..length]).into_owned())
    }
}

struct Managed {
    inspector: Inspector,
    uffd: Option<Userfaultfd>,
    is_gone: bool,
}

impl Managed {
    fn pid(&self) -> Option<Pid> {
        Pid::from_raw(self.inspector.pid())
    }

    /// Ends it, and waits until nothing of it is left.
    fn end(&mut self) -> io::Result<()> {
        if !std::mem::replace(&mut self.is_gone, true) {
            self.inspector.kill(libc::SIGKILL)?;
            waitpid(self.pid(), WaitOptions::empty())?;
        }
        Ok(())
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        // It is our child, so that it can be killed and waited for.
        let _ = self.end();
    }
}

/// The real kernel, with a program to try it on.
pub struct Linux {
    // Dropped first: what waits for an event ends when it is killed.
    processes: [Option<Managed>; PROCESSES],
    threads: Vec<Thread>,
    /// A child whose fork is under way, and its userfaultfd once that was read.
    forking: Option<(usize, Option<Userfaultfd>)>,
}

impl Linux {
    /// Starts a program.
    ///
    /// # Errors
    /// What the kernel refuses: `EPERM` for userfaultfds or their fork events without privileges.
    pub fn start() -> io::Result<Linux> {
        Linux::start_with(true)
    }

    /// The same, whose userfaultfd asks for events of forks or not.
    pub(crate) fn start_with(reports_forks: bool) -> io::Result<Linux> {
        // One at a time: a program is forked with the sockets of this one alone.
        static STARTING: Mutex<()> = Mutex::new(());
        let _alone = STARTING
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let (mut sockets, mut slots) = (Vec::new(), Vec::new());
        let stacks = Mapping::anonymous(STACK_BYTES * THREADS)?;
        for number in 0..THREADS {
            let (unix, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
            let (ours, its) = rustix::net::socketpair(unix, kind, SocketFlags::CLOEXEC, None)?;
            slots.push(ThreadSlot {
                socket: its.as_raw_fd(),
                number,
                stack_end: stacks.start().as_ptr() as usize + STACK_BYTES * (number + 1),
                slots: std::ptr::null(),
            });
            sockets.push((ours, its));
        }
        let array = slots.as_ptr();
        slots.iter_mut().for_each(|slot| slot.slots = array);
        // SAFETY: a process of its own, with copies of the stacks and of the slots, which nothing in it unmaps;
        // `begin_program` takes a slot, and uses system calls alone.
        let forked = unsafe {
            let stack_end = slots[HELPER].stack_end;
            raw::clone(
                libc::SIGCHLD as usize,
                stack_end,
                begin_program,
                array.cast(),
            )
        };
        let pid = Errno::result(forked)? as i32;
        let process = Arc::new(Process::open(pid)?);
        let inspector = Inspector::open_with_flags(&process, pid)?;
        // Killed when dropped, from here on.
        let program = Managed {
            inspector,
            uffd: None,
            is_gone: false,
        };
        let threads = sockets.into_iter().map(|(socket, _)| Thread {
            socket,
            tid: 0,
            channel: None,
            told: None,
            is_busy: false,
        });
        let mut linux = Linux {
            threads: threads.collect(),
            processes: [Some(program), None, None],
            forking: None,
        };
        for thread in HELPER..FIRST_CHILD_THREAD {
            let number = linux.receive_start(thread)?;
            if thread == HELPER {
                let handle = process.handle();
                let uffd = pidfd_getfd(handle, number as i32, PidfdGetfdFlags::empty())?;
                let features = if reports_forks {
                    FEATURES
                } else {
                    FEATURES_WITHOUT_FORKS
                };
                owned_uffd::borrow(&uffd).api(features)?;
                linux.managed(0).uffd = Some(uffd.into());
            }
        }
        Ok(linux)
    }

    fn managed(&mut self, process: usize) -> &mut Managed {
        self.processes[process].as_mut().expect("a process")
    }

    /// Takes the first message of a thread: returns its second word.
    fn receive_start(&mut self, number: usize) -> io::Result<u64> {
        let inspector = &self.processes[process_of(number)]
            .as_ref()
            .expect("a process")
            .inspector;
        let process = inspector.process().clone();
        let thread = &mut self.threads[number];
        let words = thread.answer(PATIENCE)?.ok_or(io::ErrorKind::TimedOut)?;
        assert_eq!(
            words[0],
            answer::STARTED,
            "a thread says first that it is there"
        );
        thread.tid = words[1] as u32;
        thread.channel = Some(process.open_file(&format!("task/{}/wchan", thread.tid))?);
        Ok(words[2])
    }

    /// Performs an operation, and looks.
    ///
    /// # Panics
    /// If a thread of the program neither answers nor waits.
    pub fn perform(&mut self, operation: Operation) -> Facts {
        let mut facts = Facts::default();
        match operation {
            Operation::By(number, call) => {
                if let Call::Fork(child) | Call::ForkUnreported(child) = call {
                    self.forking = Some((child, None));
                }
                let thread = &mut self.threads[number];
                thread.tell(call).expect("a program that listens");
            }
            Operation::To(process, request) => self.ask(process, request, &mut facts),
            Operation::Exit(process) => {
                self.managed(process).end().expect("a child");
                for (number, thread) in self.threads.iter_mut().enumerate() {
                    thread.is_busy &= process_of(number) != process;
                }
            }
        }
        self.settle(&mut facts);
        for (number, process) in self.processes.iter().enumerate() {
            let Some(process) = process else { continue };
            let what = |what: &str| format!("process {number}, {what}");
            if let Some(uffd) = &process.uffd {
                facts.say(what("gone"), uffd.is_gone());
                facts.say(what("changing"), uffd.is_changing());
            }
            if !process.is_gone {
                facts.look(number, &process.inspector, arena());
            }
        }
        facts
    }

    /// Waits until each thread has answered or waits for memfold.
    fn settle(&mut self, facts: &mut Facts) {
        for number in 0..THREADS {
            if !self.threads[number].is_busy {
                continue;
            }
            match self.threads[number].settle() {
                Ok(words) => {
                    self.threads[number].is_busy = false;
                    facts.say_answer(number, self.answer_of(number, words));
                }
                Err(blocked) => facts.say_blocked(number, blocked),
            }
        }
    }

    fn answer_of(&mut self, number: usize, [kind, value, other, ..]: Words) -> Answer {
        match kind {
            answer::UNMAPPED => Answer::Unmapped,
            answer::FAILED => Answer::Failed(Errno(value as i32)),
            answer::MOVED => Answer::Moved(value as u32, Errno(other as i32)),
            _ => match self.threads[number].told {
                Some(Call::Read(_)) => Answer::Contents(value),
                Some(Call::Fork(_) | Call::ForkUnreported(_)) => {
                    self.add_child(value as i32).expect("a child of ours");
                    Answer::Forked
                }
                _ => Answer::Done,
            },
        }
    }

    /// Takes a forked child in.
    fn add_child(&mut self, pid: i32) -> io::Result<()> {
        let (child, uffd) = self.forking.take().expect("one fork at a time");
        let process = Arc::new(Process::open(pid)?);
        let managed = Managed {
            inspector: Inspector::open_with_flags(&process, pid)?,
            uffd,
            is_gone: false,
        };
        self.processes[child] = Some(managed);
        self.receive_start(first_thread_of(child)).map(drop)
    }

    fn ask(&mut self, number: usize, request: Request, facts: &mut Facts) {
        let threads: Vec<u32> = self.threads.iter().map(|thread| thread.tid).collect();
        let process = self.managed(number);
        let uffd = process.uffd.as_ref().expect("a userfaultfd");
        match request {
            Request::IsRegistered(pages) => {
                facts.say("result", uffd.is_registered(pages.range()));
            }
            Request::Receive(most) => {
                let mut messages = Vec::new();
                let read = uffd.read_at_most(most, &mut messages);
                facts.say("result", read);
                facts.say_messages(&messages, |tid| {
                    let thread = threads.iter().position(|thread| *thread == tid);
                    thread.unwrap_or(THREADS)
                });
                let is_fork = |message| match message {
                    Message::Fork(uffd) => Some(uffd),
                    _ => None,
                };
                if let Some(uffd) = messages.into_iter().find_map(is_fork)
                    && let Some((_, its)) = &mut self.forking
                {
                    *its = Some(uffd);
                }
            }
            request => ask(uffd, &process.inspector, request, facts),
        }
    }
}
