//! A table whose columns go, least important first, where the terminal is too narrow for them. No number
//! is ever cut.

use ratatui::layout::Constraint;

/// A column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Column {
    /// Above it.
    pub title: &'static str,
    /// Columns with a larger number go first; 0 stays.
    pub rank: u8,
    /// Whether it takes the rest of the line, and may be cut.
    pub is_text: bool,
}

/// Columns of a text that are shown at least.
const LEAST_TEXT: usize = 12;

fn characters(text: &str) -> usize {
    text.chars().count()
}

/// Which columns fit into `width`, and the width of each.
pub fn fitting(columns: &[Column], rows: &[Vec<String>], width: usize) -> Vec<(usize, usize)> {
    let needed = |index: usize| {
        let cells = rows.iter().map(|row| characters(&row[index]));
        let widest = cells.chain([characters(columns[index].title) + 1]).max();
        let widest = widest.unwrap_or(0);
        if columns[index].is_text {
            widest.min(LEAST_TEXT)
        } else {
            widest
        }
    };
    let mut chosen: Vec<usize> = (0..columns.len()).collect();
    let total = |chosen: &[usize]| {
        let gaps = chosen.len().saturating_sub(1);
        chosen.iter().map(|index| needed(*index)).sum::<usize>() + gaps
    };
    while chosen.len() > 1 && total(&chosen) > width {
        let last = (0..chosen.len()).max_by_key(|place| columns[chosen[*place]].rank);
        chosen.remove(last.unwrap_or(0));
    }
    // One number that does not fit would be cut: a text may be.
    if total(&chosen) > width
        && let Some(text) = columns.iter().position(|column| column.is_text)
    {
        chosen = vec![text];
    }
    let rest = width.saturating_sub(total(&chosen));
    chosen
        .into_iter()
        .map(|index| {
            let more = if columns[index].is_text { rest } else { 0 };
            (index, needed(index) + more)
        })
        .collect()
}

/// The widths for a table.
pub fn constraints(fitting: &[(usize, usize)]) -> Vec<Constraint> {
    let widths = fitting.iter().map(|(_, width)| *width as u16);
    widths.map(Constraint::Length).collect()
}

/// Parts of a text in lines of at most `width`: none is divided. One that is longer is left out.
pub fn flowed(parts: &[String], width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for part in parts.iter().filter(|part| characters(part) <= width) {
        match lines.last_mut() {
            Some(line) if characters(line) + 3 + characters(part) <= width => {
                line.push_str("   ");
                line.push_str(part);
            }
            _ => lines.push(part.clone()),
        }
    }
    lines
}

/// A text in lines of at most `width`, where its words allow that.
pub fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if characters(line) + 1 + characters(word) <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// The first text that fits; nothing if none does.
pub fn first_that_fits(texts: &[String], width: usize) -> &str {
    let fits = texts.iter().find(|text| characters(text) <= width);
    fits.map_or("", String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_go_before_digits_do() {
        let columns = [
            ("PID", 0, false),
            ("USED", 1, false),
            ("OUT", 2, false),
            ("COMMAND", 0, true),
        ];
        let columns = columns.map(|(title, rank, is_text)| Column {
            title,
            rank,
            is_text,
        });
        let row = [
            "4194303",
            "1023 MiB",
            "12,345,678",
            "a-long-command --with arguments",
        ];
        let rows = vec![row.map(str::to_owned).to_vec()];
        for width in 1..200 {
            let fitting = fitting(&columns, &rows, width);
            assert!(!fitting.is_empty());
            for (index, given) in &fitting {
                let is_cut = row[*index].len() > (*given).min(width);
                assert!(
                    !is_cut || columns[*index].is_text,
                    "{width}: {}",
                    row[*index]
                );
            }
            let used: usize = fitting.iter().map(|(_, given)| given + 1).sum();
            assert!(
                used - 1 <= width || fitting.len() == 1,
                "{width}: {fitting:?}"
            );
        }
        let titles = |width| -> Vec<_> {
            let shown = fitting(&columns, &rows, width);
            shown
                .iter()
                .map(|(index, _)| columns[*index].title)
                .collect()
        };
        assert_eq!(titles(100), ["PID", "USED", "OUT", "COMMAND"]);
        assert_eq!(titles(32), ["PID", "USED", "COMMAND"]);
        assert_eq!(titles(20), ["PID", "COMMAND"]);
    }

    #[test]
    fn parts_flow() {
        let parts = ["resident 1 MiB", "pool 2 MiB", "metadata 3 MiB"].map(str::to_owned);
        assert_eq!(
            flowed(&parts, 30),
            ["resident 1 MiB   pool 2 MiB", "metadata 3 MiB"]
        );
        assert_eq!(flowed(&parts, 13), ["pool 2 MiB"]);
        assert_eq!(first_that_fits(&parts, 12), "pool 2 MiB");
        assert_eq!(first_that_fits(&parts, 9), "");
        assert_eq!(wrapped("in use: 64.0 MiB", 10), ["in use:", "64.0 MiB"]);
    }
}
