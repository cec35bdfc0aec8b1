//! The kernel's side: a zram device of our own as swap, and anonymous memory.

use super::{Memory, PAGE};
use std::ffi::CString;
use std::fs;
use std::io;
use std::process::Command;

/// A zram device in use as swap, the first to be used; removed on drop.
pub struct Zram {
    number: u32,
    device: CString,
}

impl Zram {
    pub fn new(megabytes: usize) -> io::Result<Zram> {
        let number = fs::read_to_string("/sys/class/zram-control/hot_add")?;
        let number: u32 = number.trim().parse().map_err(io::Error::other)?;
        let device = CString::new(format!("/dev/zram{number}"))?;
        let zram = Zram { number, device };
        let set =
            |name: &str, value: String| fs::write(format!("/sys/block/zram{number}/{name}"), value);
        set("comp_algorithm", "lz4".to_owned())?;
        set("disksize", format!("{megabytes}M"))?;
        let made = Command::new("mkswap")
            .arg(format!("/dev/zram{number}"))
            .output()?;
        if !made.status.success() {
            return Err(io::Error::other("mkswap failed"));
        }
        const PREFER: i32 = 0x8000 | 0x7fff;
        // SAFETY: a terminated path and flags.
        if unsafe { libc::swapon(zram.device.as_ptr(), PREFER) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(zram)
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        // SAFETY: a terminated path.
        unsafe { libc::swapoff(self.device.as_ptr()) };
        let _ = fs::write(format!("/sys/block/zram{}/reset", self.number), "1");
        let _ = fs::write(
            "/sys/class/zram-control/hot_remove",
            self.number.to_string(),
        );
    }
}

/// Anonymous memory.
pub struct Mapped(*mut u8, usize);

impl Mapped {
    pub fn new(length: usize) -> Mapped {
        // SAFETY: a new mapping where the kernel likes; the advice only keeps huge pages away, of
        // which each would be stored as its small ones.
        let start = unsafe {
            let start = libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            );
            assert!(start != libc::MAP_FAILED, "no memory");
            libc::madvise(start, length, libc::MADV_NOHUGEPAGE);
            start
        };
        Mapped(start.cast(), length)
    }

    fn resident(&self) -> usize {
        let mut pages = vec![0_u8; self.1 / PAGE];
        // SAFETY: a byte a page of a live mapping. (A page that is still in the swap cache counts.)
        unsafe { libc::mincore(self.0.cast(), self.1, pages.as_mut_ptr()) };
        pages.iter().filter(|page| **page & 1 != 0).count()
    }
}

impl Memory for Mapped {
    fn start(&self) -> *mut u8 {
        self.0
    }

    fn page_out(&mut self) {
        // SAFETY: an advice on a live mapping.
        let result = unsafe { libc::madvise(self.0.cast(), self.1, libc::MADV_PAGEOUT) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        let left = self.resident();
        assert!(left < self.1 / PAGE / 50, "{left} pages stayed");
    }

    fn unmap(self: Box<Self>) {
        // SAFETY: the mapping is this value's own and used by nobody any more.
        unsafe { libc::munmap(self.0.cast(), self.1) };
    }
}
