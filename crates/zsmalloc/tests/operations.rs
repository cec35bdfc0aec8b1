//! The fuzz target's interpreter, on random bytes.

#[path = "common/operations.rs"]
mod operations;

#[test]
fn random_operations_keep_the_pool_sound() {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..60 {
        let input: Vec<u8> = (0..12_000)
            .map(|_| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                (random >> 32) as u8
            })
            .collect();
        operations::run(&input);
    }
}
