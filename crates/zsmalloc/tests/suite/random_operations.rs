//! The fuzz target's interpreter, on random bytes.

#[path = "../common/operations.rs"]
mod operations;

#[test]
fn random_operations_keep_the_pool_sound() {
    let mut random = memfold_testing::Random::new(0);
    for _ in 0..60 {
        let input: Vec<u8> = (0..12_000)
            .map(|_| (random.next_word() >> 32) as u8)
            .collect();
        operations::run(&input);
    }
}
