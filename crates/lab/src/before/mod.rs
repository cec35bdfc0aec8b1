//! Published designs that others replaced. Nothing in the product depends on them.

pub mod zsmalloc;
