//! One execution: a program with its threads and children, and memfold's threads beside them.

use crate::simulation::history::{History, places};
use crate::simulation::model::memory::Memory;
use crate::simulation::program::ProgramThread;
use crate::simulation::trace::trace;
use crate::simulation::world::{World, named};
use crate::simulation::{adversity, progress, sync, time};
use shuttle::thread::JoinHandle;
use std::sync::Arc;

/// Begins an execution: memfold's threads, and no program.
pub(crate) fn begin(history: &History) -> (Arc<World>, Memfold) {
    time::reset();
    sync::reset();
    adversity::begin(history.adversity, history.locked_range());
    trace(|| "begins".to_owned());
    let world = Arc::new(World::new(history));
    let memfold = Memfold::start(&world, history.handlers);
    (world, memfold)
}

/// One execution with a program of one thread that does what `program` says.
pub(crate) fn execute_alone(
    history: &History,
    program: impl FnOnce(&World, &Arc<Memory>) + Send + 'static,
) {
    let (world, memfold) = begin(history);
    let memory = Arc::new(Memory::new(world.next_thread() as i32));
    world.start(&memory);
    let (beside, its) = (world.clone(), memory.clone());
    let thread = named("program", move || program(&beside, &its));
    thread.join().expect("a program");
    world.exit(&memory);
    drop(memory);
    memfold.join(&world);
    world.finish();
}

/// One execution of a history, as a thread of shuttle's.
pub(crate) fn execute(history: &History) {
    progress::note_begin();
    let (world, memfold) = begin(history);
    let memory = Arc::new(Memory::new(world.next_thread() as i32));
    world.start(&memory);
    let threads: Vec<_> = history
        .threads
        .iter()
        .enumerate()
        .map(|(number, steps)| {
            let is_its =
                |place: &usize| history.share_places || place % history.threads.len() == number;
            let all = places(history.adversity.high).enumerate();
            let its = all.filter(|(place, _)| is_its(place));
            let its = its.map(|(_, start)| start).collect();
            let thread = ProgramThread::new(world.clone(), memory.clone(), its);
            let steps = steps.clone();
            named("program", move || thread.run(&steps))
        })
        .collect();
    threads
        .into_iter()
        .for_each(|thread| thread.join().expect("a thread"));
    world.exit(&memory);
    drop(memory);
    memfold.join(&world);
    world.finish();
    progress::note_end();
}

/// memfold's threads.
pub(crate) struct Memfold(Vec<JoinHandle<()>>);

impl Memfold {
    /// Starts them.
    pub(crate) fn start(world: &Arc<World>, handlers: u32) -> Memfold {
        type Role = (&'static str, fn(&World));
        let roles: [Role; 2] = [("governor", World::govern), ("reclaimer", World::reclaim)];
        let others = roles.map(|(name, run)| {
            let world = world.clone();
            named(name, move || run(&world))
        });
        let mut threads: Vec<_> = (0..handlers)
            .map(|_| {
                let world = world.clone();
                named("handler", move || world.handle())
            })
            .collect();
        world.set_handlers(
            threads
                .iter()
                .map(|thread| thread.thread().clone())
                .collect(),
        );
        threads.extend(others);
        Memfold(threads)
    }

    /// Waits for their ends, and for those of helpers and children, once all programs have exited.
    pub(crate) fn join(self, world: &World) {
        for thread in self.0 {
            thread.join().expect("a thread of memfold's");
        }
        while let Some(thread) = world.started() {
            thread.join().expect("a helper or a child");
        }
    }
}
