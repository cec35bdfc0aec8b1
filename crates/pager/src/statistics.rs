//! What the statistics of both engines share: each is defined once, by a line of a table.

/// One number of a structure of statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct StatsField {
    /// The name of the field in Rust, in JSON, in C, and in Python's dictionary.
    pub name: &'static str,
    /// What is counted, in which unit.
    pub description: &'static str,
}

/// Defines a structure of `u64` statistics, behind fields of other types if there are any, and the
/// table of their names and descriptions.
macro_rules! statistics {
    (
        $(#[$meta:meta])*
        $name:ident $([$($(#[$other_meta:meta])* $other:ident: $kind:ty,)+])? {
            $($(#[doc = $doc:literal])+ $field:ident,)+
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        pub struct $name {
            $($($(#[$other_meta])* pub $other: $kind,)+)?
            // Another version may not have it.
            $($(#[doc = $doc])+ #[cfg_attr(feature = "serde", serde(default))] pub $field: u64,)+
        }

        impl $name {
            /// Name and description of each number, in the order of the fields.
            pub const FIELDS: &'static [$crate::statistics::StatsField] = &[
                $($crate::statistics::StatsField {
                    name: stringify!($field),
                    description: concat!($($doc, "\n"),+),
                },)+
            ];
        }
    };
}
pub(crate) use statistics;
