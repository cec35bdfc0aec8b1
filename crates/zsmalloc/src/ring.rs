//! A bounded queue of object words: many producers, one consumer at a time, no lock between them.

use crate::{
    boxed,
    sync::{
        Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        lock, pause, try_lock,
    },
    word::ObjectWord,
};

/// The tail: words ever pushed (low half, wrapping) and bytes that the queued words stand for (high
/// half). One compare-and-swap reserves a place and its bytes.
const BYTES_SHIFT: u32 = 32;
const COUNT_MASK: u64 = (1 << BYTES_SHIFT) - 1;

/// Bytes of the average object. Where objects are smaller, places run out before bytes do.
const BYTES_PER_PLACE: usize = 1024;

/// Words whose free is deferred.
///
/// A producer reserves a place by moving the tail, then writes its word there with release. The
/// consumer takes words with acquire from the head until it meets an empty place (zero): not
/// reserved, or not written yet. It zeroes a place before it moves the head past it with release; a
/// producer loads the head with acquire before it reserves, so its place is zero and its own.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Ring {
    tail: AtomicU64,
    places: Box<[AtomicU64]>,
    max_bytes: u64,
    head: HeadLine,
    consumer: Mutex<()>,
    /// Words that were taken and not freed yet. Grows under `consumer` only.
    taken: AtomicUsize,
}

/// On a separate cache line: the consumer writes it while producers write the tail.
#[derive(Debug)]
#[repr(align(64))]
struct HeadLine(AtomicU64);

impl Ring {
    /// A queue for at most `places` words (a power of two) that stand for at most `max_bytes`.
    /// `None` if the heap refuses memory.
    pub(crate) fn new(places: usize, max_bytes: usize) -> Option<Self> {
        debug_assert!(places.is_power_of_two() && places < 1 << (BYTES_SHIFT - 1));
        Some(Self {
            tail: AtomicU64::new(0),
            places: boxed(places, || AtomicU64::new(0))?,
            max_bytes: (max_bytes as u64).min(COUNT_MASK),
            head: HeadLine(AtomicU64::new(0)),
            consumer: Mutex::new(()),
            taken: AtomicUsize::new(0),
        })
    }

    /// A queue for words that stand for at most `bytes` bytes, with as many places as that many
    /// bytes of average objects need.
    pub(crate) fn for_bytes(bytes: usize) -> Option<Self> {
        let places = (bytes / BYTES_PER_PLACE)
            .next_power_of_two()
            .clamp(64, 1 << 22);
        Self::new(places, bytes)
    }

    pub(crate) fn places(&self) -> usize {
        self.places.len()
    }

    /// Bytes the words in the queue stand for.
    pub(crate) fn bytes(&self) -> usize {
        (self.tail.load(Ordering::Relaxed) >> BYTES_SHIFT) as usize
    }

    /// Words in the queue, including those being pushed.
    pub(crate) fn len(&self) -> usize {
        let head = self.head.0.load(Ordering::Acquire);
        let tail = self.tail.load(Ordering::Relaxed) & COUNT_MASK;
        (tail.wrapping_sub(head) & COUNT_MASK) as usize
    }

    /// Pushes a word that stands for `bytes` bytes; `false` if there is no room. Never waits.
    #[inline]
    pub(crate) fn push(&self, word: ObjectWord, bytes: usize) -> bool {
        let mut tail = self.tail.load(Ordering::Relaxed);
        loop {
            let count = tail & COUNT_MASK;
            // Acquire: the places before this head were zeroed.
            let head = self.head.0.load(Ordering::Acquire);
            let queued_bytes = (tail >> BYTES_SHIFT) + bytes as u64;
            let queued = count.wrapping_sub(head) & COUNT_MASK;
            if queued >= self.places.len() as u64 || queued_bytes > self.max_bytes {
                return false;
            }
            let next = (queued_bytes << BYTES_SHIFT) | (count.wrapping_add(1) & COUNT_MASK);
            match self
                .tail
                .compare_exchange_weak(tail, next, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => {
                    let place = &self.places[count as usize & (self.places.len() - 1)];
                    // Release: the thread's accesses to the object happen before its free.
                    place.store(word.into_raw(), Ordering::Release);
                    return true;
                }
                Err(now) => tail = now,
            }
        }
    }

    /// Reports that `taken` words taken earlier are freed.
    pub(crate) fn finished(&self, taken: usize) {
        // Release: a waiter sees the frees.
        self.taken.fetch_sub(taken, Ordering::Release);
    }

    /// Waits until all words that were taken are freed.
    pub(crate) fn wait_until_finished(&self) {
        // No more are taken meanwhile, so this ends.
        let _consumer = lock(&self.consumer);
        for times in 0.. {
            if self.taken.load(Ordering::Acquire) == 0 {
                return;
            }
            pause(times);
        }
    }

    /// Takes words until `words` is full or none is left, waiting for another consumer. `bytes_of`
    /// returns the bytes that a word stands for. The caller must call [`Ring::finished`]
    /// afterwards.
    pub(crate) fn take(
        &self,
        words: &mut [ObjectWord],
        bytes_of: impl Fn(ObjectWord) -> usize,
    ) -> usize {
        let _consumer = lock(&self.consumer);
        self.take_locked(words, bytes_of)
    }

    /// Like [`Ring::take`], but takes nothing if there is another consumer.
    pub(crate) fn try_take(
        &self,
        words: &mut [ObjectWord],
        bytes_of: impl Fn(ObjectWord) -> usize,
    ) -> usize {
        let Some(_consumer) = try_lock(&self.consumer) else {
            return 0;
        };
        self.take_locked(words, bytes_of)
    }

    fn take_locked(
        &self,
        words: &mut [ObjectWord],
        bytes_of: impl Fn(ObjectWord) -> usize,
    ) -> usize {
        let head = self.head.0.load(Ordering::Relaxed);
        let (mut taken, mut bytes) = (0, 0);
        for slot in words.iter_mut() {
            let position = head.wrapping_add(taken as u64) as usize & (self.places.len() - 1);
            let place = &self.places[position];
            let Some(word) = ObjectWord::from_raw(place.load(Ordering::Acquire)) else {
                break;
            };
            place.store(0, Ordering::Relaxed);
            bytes += bytes_of(word) as u64;
            *slot = word;
            taken += 1;
        }
        if taken > 0 {
            self.head
                .0
                .store((head + taken as u64) & COUNT_MASK, Ordering::Release);
            self.tail.fetch_sub(bytes << BYTES_SHIFT, Ordering::AcqRel);
            self.taken.fetch_add(taken, Ordering::Relaxed);
        }
        taken
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::geometry::PageNumber;

    fn word(n: u32) -> ObjectWord {
        ObjectWord::new(0, PageNumber(n), 0)
    }

    #[test]
    fn words_are_taken_in_order_across_the_end() {
        let ring = Ring::new(4, 1000).unwrap();
        let mut out = [word(0); 3];
        for round in 0..100 {
            for n in 0..3 {
                assert!(ring.push(word(round * 3 + n), 10));
            }
            assert_eq!((ring.bytes(), ring.len()), (30, 3));
            assert_eq!(ring.take(&mut out, |_| 10), 3);
            assert_eq!(
                out.map(|word| word.page().0),
                [0, 1, 2].map(|n| round * 3 + n)
            );
            assert_eq!((ring.bytes(), ring.len()), (0, 0));
        }
    }

    #[test]
    fn places_and_bytes_are_bounded() {
        let ring = Ring::new(4, 35).unwrap();
        assert!((0..3).all(|n| ring.push(word(n), 10)) && !ring.push(word(3), 10));
        assert!(ring.push(word(3), 5) && !ring.push(word(4), 0));
        let mut out = [word(9); 8];
        assert_eq!(
            ring.take(&mut out, |word| if word.page().0 == 3 { 5 } else { 10 }),
            4
        );
        assert!(ring.push(word(5), 35));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::geometry::PageNumber;
    use loom::{
        sync::{Arc, atomic::AtomicUsize},
        thread,
    };

    fn word(n: u32) -> ObjectWord {
        ObjectWord::new(0, PageNumber(n), 0)
    }

    /// A consumer sees what the producer wrote before it pushed the word, and every pushed word is
    /// taken exactly once, also across the end of the ring.
    #[test]
    fn words_are_handed_over_once_with_what_came_before() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let ring = Arc::new(Ring::new(2, 100).unwrap());
            let payload: Arc<[AtomicUsize; 3]> =
                Arc::new(std::array::from_fn(|_| AtomicUsize::new(0)));
            let producer = |numbers: std::ops::Range<u32>| {
                let (ring, payload) = (ring.clone(), payload.clone());
                thread::spawn(move || {
                    numbers
                        .filter(|&n| {
                            payload[n as usize].store(7, Ordering::Relaxed);
                            ring.push(word(n), 10)
                        })
                        .count()
                })
            };
            let producers = [producer(0..2), producer(2..3)];
            let mut seen = [0; 3];
            let mut drain = || {
                let mut out = [word(9); 2];
                let taken = ring.take(&mut out, |_| 10);
                for word in &out[..taken] {
                    let n = word.page().0 as usize;
                    assert_eq!(payload[n].load(Ordering::Relaxed), 7);
                    seen[n] += 1;
                }
                taken
            };
            let early = drain();
            let pushed: usize = producers
                .into_iter()
                .map(|producer| producer.join().unwrap())
                .sum();
            let late = drain() + drain();
            assert_eq!(early + late, pushed);
            assert!(seen.iter().all(|&times| times <= 1));
            assert_eq!((ring.bytes(), ring.len()), (0, 0));
        });
    }
}
