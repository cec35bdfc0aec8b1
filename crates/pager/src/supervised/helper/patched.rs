//! The library's image with what it must know of this process.

use memfold_sys::hello::{PATCHED, RENDEZVOUS_MARK, Rendezvous};

/// An image in which a rendezvous is patched.
#[derive(Debug)]
pub(crate) struct Patched {
    pub image: Vec<u8>,
    /// Where it is in the image.
    pub place: usize,
}

impl Patched {
    /// Writes a rendezvous over the mark in an image. `None` if there is no mark, or several, or no room behind it.
    pub(crate) fn new(image: &[u8], rendezvous: &Rendezvous) -> Option<Patched> {
        let mark = RENDEZVOUS_MARK.as_slice();
        let windows = image.windows(mark.len()).enumerate();
        let mut places = windows.filter(|(_, window)| *window == mark);
        let (Some((place, _)), None) = (places.next(), places.next()) else {
            return None;
        };
        let mut image = image.to_vec();
        let room = image.get_mut(place..place + PATCHED)?;
        room.copy_from_slice(&rendezvous.to_bytes());
        Some(Patched { image, place })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_sys::hello::{SOCKET_PATH_MAX, STARTS_LATE_AT};

    #[test]
    fn the_rendezvous_is_written_over_the_mark() {
        let mut image = vec![1u8; 50];
        image.extend(RENDEZVOUS_MARK);
        image.extend([0u8; PATCHED]);
        let mut socket_path = [0; SOCKET_PATH_MAX];
        socket_path[..6].copy_from_slice(b"/run/x");
        let rendezvous = Rendezvous {
            socket_path,
            filters: 1,
            user: 2,
            pid: 3,
            user_namespace: 4,
            inspects_others: 5,
            carries: 6,
            starts_late: 7,
        };
        let patched = Patched::new(&image, &rendezvous).unwrap();
        assert_eq!(patched.place, 50);
        let (image, length) = (&patched.image, image.len());
        assert_eq!(&image[50..57], b"/run/x\0");
        let user = 50 + SOCKET_PATH_MAX + 4;
        assert_eq!(image[user..][..4], 2u32.to_ne_bytes());
        assert_eq!(image[user + 4..][..4], 3i32.to_ne_bytes());
        assert_eq!(image[user + 8..][..8], 4u64.to_ne_bytes());
        assert_eq!(image[50 + STARTS_LATE_AT..][..4], 7u32.to_ne_bytes());
        assert_eq!(image.len(), length);
        assert!(
            Patched::new(image, &rendezvous).is_none(),
            "the mark is gone"
        );
    }
}
