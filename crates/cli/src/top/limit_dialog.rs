//! A limit is changed by keys: a size is typed, or a tenth more or less is proposed, and then confirmed.

use crate::adjust::{excess, limit_text};
use crate::control::{self, Answer, Command, LEAST_LIMIT, run_of};
use crate::format::bytes;
use crate::instance::Instance;
use crate::report::LimitKind;
use memfold_pager::Size;
use ratatui::crossterm::event::KeyCode;

/// Characters of a size that is typed.
const LONGEST_SIZE: usize = 16;
/// Proposed limits are whole multiples of this.
const WHOLE: u64 = 1 << 20;

/// A limit that is to be changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitChange {
    /// memfold's PID.
    pub pid: u32,
    /// The limit in force.
    pub old: u64,
    /// The new one, as users write it.
    pub size: String,
    /// Whether it is the limit on resident memory.
    pub resident: bool,
}

impl LimitChange {
    fn what(&self) -> &'static str {
        if self.resident {
            "resident limit"
        } else {
            "limit"
        }
    }

    /// Has the run change it, however long that takes, and tells what came of it.
    pub fn perform(&self) -> String {
        let order = Command::Limit {
            size: self.size.clone(),
            resident: self.resident,
        };
        let answer =
            run_of(self.pid).and_then(|(folder, pid)| control::command(&folder, pid, &order));
        match answer {
            Ok(Answer::Limit { old, new, usage }) => {
                let text = limit_text(self.what(), self.pid, old, new, usage);
                match excess(new, usage, self.resident) {
                    0 => text,
                    _ => format!(
                        "{text}; not reached yet, as no more memory can be paged out for now"
                    ),
                }
            }
            Ok(_) => "the run gave another answer than expected".to_owned(),
            Err(failure) => format!("the {} is not changed: {}", self.what(), failure),
        }
    }
}

/// What is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LimitDialog {
    /// For the size.
    Typing(LimitChange),
    /// Whether to do it.
    Confirming(LimitChange),
}

/// What a key did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// It goes on.
    Open(LimitDialog),
    /// It is over, and nothing is changed.
    Closed,
    /// The limit is to be changed.
    Confirmed(LimitChange),
    /// The size is none, for this reason.
    Refused(LimitDialog, String),
}

/// How a new limit is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proposal {
    /// By typing it.
    Typed,
    /// A tenth more.
    More,
    /// A tenth less.
    Less,
}

impl LimitDialog {
    /// Opens it for an instance.
    ///
    /// # Errors
    /// If that has no limit that can be changed.
    pub fn open(instance: &Instance, proposal: Proposal) -> Result<LimitDialog, String> {
        let run = match instance {
            Instance::Run(run) => run,
            Instance::Disk(_) => {
                return Err("a disk's limit is set when it starts (memfold serve --limit)".into());
            }
        };
        let (old, kind) = run.statistics.limit_in_force();
        let proposed = match proposal {
            Proposal::Typed => None,
            Proposal::More => Some(old.saturating_add(old / 10)),
            Proposal::Less => Some(old - old / 10),
        };
        let whole = proposed.map(|size| size.max(LEAST_LIMIT).div_ceil(WHOLE));
        let change = LimitChange {
            pid: run.pid,
            old,
            size: whole.map_or(String::new(), |whole| format!("{whole}M")),
            resident: kind == LimitKind::Resident,
        };
        Ok(match proposal {
            Proposal::Typed => LimitDialog::Typing(change),
            Proposal::More | Proposal::Less => LimitDialog::Confirming(change),
        })
    }

    /// Takes a key.
    pub fn press(self, key: KeyCode) -> Step {
        match self {
            LimitDialog::Typing(mut change) => match key {
                KeyCode::Esc => Step::Closed,
                KeyCode::Enter => match change.size.parse::<Size>() {
                    Ok(_) => Step::Open(LimitDialog::Confirming(change)),
                    Err(error) => Step::Refused(LimitDialog::Typing(change), error.to_string()),
                },
                KeyCode::Backspace => {
                    change.size.pop();
                    Step::Open(LimitDialog::Typing(change))
                }
                KeyCode::Char(letter)
                    if (letter.is_ascii_alphanumeric() || letter == '.' || letter == '%')
                        && change.size.len() < LONGEST_SIZE =>
                {
                    change.size.push(letter);
                    Step::Open(LimitDialog::Typing(change))
                }
                _ => Step::Open(LimitDialog::Typing(change)),
            },
            LimitDialog::Confirming(change) => match key {
                KeyCode::Char('y' | 'Y') => Step::Confirmed(change),
                _ => Step::Closed,
            },
        }
    }

    /// The question.
    pub fn text(&self) -> String {
        match self {
            LimitDialog::Typing(change) => format!(
                "new {} of run {} instead of {}: {}_",
                change.what(),
                change.pid,
                bytes(change.old),
                change.size
            ),
            LimitDialog::Confirming(change) => format!(
                "change the {} of run {} from {} to {}? y/n",
                change.what(),
                change.pid,
                bytes(change.old),
                shown(&change.size)
            ),
        }
    }
}

/// A size as others are shown; a percentage, which is of what the run's host allows, as it was typed.
fn shown(size: &str) -> String {
    match size.parse::<Size>() {
        Ok(Size::Bytes(size)) => bytes(size),
        _ => size.to_owned(),
    }
}
