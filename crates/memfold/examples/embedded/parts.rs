//! What a swap-in is made of: each part measured by itself.

use serde_json::{Value, json};

pub fn measure(_pages: usize) -> Value {
    json!({})
}
