//! What memfold asks of the kernel about a process, where both kernels are asked alike.

use crate::simulation::conformance::facts::{Facts, copy_out, errno};
use crate::simulation::conformance::operation::{Request, page};
use crate::simulation::model::memory::spread;
use crate::supervised::kernel::{Memory, Process};
use memfold_sys::uffd::Partial;
use memfold_sys::{Errno, PAGE_SIZE};

/// Does what memfold asks for, where both kernels are asked alike.
pub(crate) fn ask(
    uffd: &impl Memory,
    inspector: &impl Process,
    request: Request,
    facts: &mut Facts,
) {
    let what = "result";
    match request {
        Request::Register(pages) => facts.say(what, uffd.register(pages.range())),
        Request::RegisterProtectable(pages) => {
            facts.say(what, uffd.register_protectable(pages.range()));
        }
        Request::Unregister(pages) => facts.say(what, uffd.unregister(pages.range())),
        Request::CopyIn(pages, tag) => {
            let source = contents(pages.1, tag);
            let result = uffd.copy_in(pages.range().start, &source, pages.1);
            facts.say(what, filled(result));
        }
        Request::PutPage(number, tag) => {
            let mut source = [0; PAGE_SIZE];
            spread(tag, &mut source);
            facts.say(what, filled(uffd.put_page(page(number), &source)));
        }
        Request::Zero(number) => facts.say(what, filled(uffd.zero(page(number)))),
        Request::Wake(pages) => facts.say(what, uffd.wake(pages.range())),
        Request::Protect(pages) => facts.say(what, uffd.protect(pages.range())),
        Request::Unprotect(pages) => facts.say(what, uffd.unprotect(pages.range())),
        Request::CopyOut(pages) => {
            let pages: Vec<u64> = (pages.0..pages.0 + pages.1).collect();
            facts.say(what, copy_out(inspector, &pages));
        }
        Request::MappingAround(number) => {
            // How far it reaches depends on merging: so it must be what `vmas` shows.
            let around = inspector.mapping_around(page(number)).map_err(errno);
            let areas = inspector.vmas().map_err(errno);
            let is_one = |(start, end): (u64, u64)| {
                let mut areas = areas.iter().flatten();
                areas.any(|area| (area.start, area.end) == (start, end))
            };
            facts.say(what, around.map(|around| around.map(is_one)));
        }
        Request::IsRegistered(_) | Request::Receive(_) => unreachable!("asked of each kernel"),
    }
}

/// The result of filling pages: how many were filled.
fn filled(result: Result<(), Partial>) -> Result<(), (u64, Errno)> {
    result.map_err(|partial| (partial.done / PAGE_SIZE as u64, partial.errno))
}

/// The pages of a copy with these contents from the first on.
fn contents(pages: u64, tag: u64) -> Vec<u8> {
    let mut bytes = vec![0; pages as usize * PAGE_SIZE];
    for (page, tag) in bytes.chunks_mut(PAGE_SIZE).zip(tag..) {
        spread(tag, page);
    }
    bytes
}
