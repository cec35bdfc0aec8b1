//! The tables: of runs and disks, of a run's programs, of a program's mappings.

use super::columns::{Column, constraints, first_that_fits, fitting};
use super::mappings::Mapping;
use super::view::{View, programs_of};
use crate::format::{bytes, name_of, ratio};
use crate::report::Snapshot;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};
use ratatui::widgets::{Paragraph, Row, Table, TableState, Wrap};

const fn number(title: &'static str, rank: u8) -> Column {
    Column {
        title,
        rank,
        is_text: false,
    }
}

const COMMAND: Column = Column {
    title: "COMMAND",
    rank: 0,
    is_text: true,
};

/// The columns of the list of runs and disks.
pub const INSTANCES: [Column; 8] = [
    number("PID", 1),
    number("USED", 0),
    number("LIMIT", 3),
    number("OUT/s", 4),
    number("IN/s", 5),
    number("P99", 6),
    number("PROGRAMS", 7),
    COMMAND,
];

/// The columns of the list of programs.
const PROGRAMS: [Column; 7] = [
    number("PID", 1),
    number("RESIDENT", 0),
    number("STAGED", 4),
    number("POOL", 2),
    number("FILE", 3),
    number("REMOTE", 5),
    COMMAND,
];

/// The columns of the list of mappings.
const MAPPINGS: [Column; 6] = [
    number("ADDRESS", 5),
    number("SIZE", 3),
    number("RESIDENT", 0),
    number("OUT", 1),
    number("RATIO", 2),
    Column {
        title: "MAPPING",
        rank: 4,
        is_text: true,
    },
];

/// Draws the columns that fit.
pub fn draw_table(
    frame: &mut Frame<'_>,
    area: Rect,
    columns: &[Column],
    rows: &[Vec<String>],
    sorted: Option<(&str, bool)>,
    chosen: Option<usize>,
) {
    let shown = fitting(columns, rows, area.width.into());
    let title = |index: usize| {
        let title = columns[index].title;
        match sorted {
            Some((by, false)) if by == title => format!("{title}▾"),
            Some((by, true)) if by == title => format!("{title}▴"),
            _ => title.to_owned(),
        }
    };
    let aligned = |index: usize, text: String, width: usize| {
        if columns[index].is_text {
            text
        } else {
            format!("{text:>width$}")
        }
    };
    let header: Vec<String> = shown
        .iter()
        .map(|(index, width)| aligned(*index, title(*index), *width))
        .collect();
    let rows = rows.iter().map(|row| {
        let cells = shown.iter();
        Row::new(cells.map(|(index, width)| aligned(*index, row[*index].clone(), *width)))
    });
    let table = Table::new(rows, constraints(&shown))
        .header(Row::new(header).style(Style::new().add_modifier(Modifier::BOLD)))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut state = TableState::default().with_selected(chosen);
    frame.render_stateful_widget(table, area, &mut state);
}

/// The area below a heading of one line.
fn below(area: Rect) -> Rect {
    Rect {
        y: area.y + 1.min(area.height),
        height: area.height.saturating_sub(1),
        ..area
    }
}

/// Draws the programs of a run.
pub fn draw_programs(frame: &mut Frame<'_>, area: Rect, view: &View, run: &Snapshot) {
    let programs = programs_of(run);
    let rows: Vec<Vec<String>> = programs
        .iter()
        .map(|usage| {
            vec![
                usage.pid.to_string(),
                bytes(usage.resident_bytes),
                bytes(usage.staged_bytes),
                bytes(usage.pool_bytes),
                bytes(usage.file_bytes),
                bytes(usage.remote_bytes),
                name_of(usage.pid),
            ]
        })
        .collect();
    let chosen = view.chosen_program().map(|(row, _)| row);
    draw_table(frame, below(area), &PROGRAMS, &rows, None, chosen);
}

/// Draws the mappings of the chosen program.
pub fn draw_mappings(frame: &mut Frame<'_>, area: Rect, view: &View) {
    let Some((_, pid)) = view.chosen_program() else {
        let text = Paragraph::new("The run has no program that memfold manages.");
        frame.render_widget(text.wrap(Wrap { trim: false }), below(area));
        return;
    };
    let heading = Rect {
        height: area.height.min(1),
        ..area
    };
    let name = name_of(pid);
    let texts = [
        format!("mappings of PID {pid} ({name}) that can be paged out, the largest first"),
        format!("mappings of PID {pid}"),
        format!("PID {pid}"),
    ];
    let text = first_that_fits(&texts, area.width.into()).to_owned();
    frame.render_widget(
        Paragraph::new(text).style(Style::new().add_modifier(Modifier::DIM)),
        heading,
    );
    match &view.mappings {
        None => {}
        Some(Err(why)) => {
            let text = Paragraph::new(format!("They are not known: {why}"));
            frame.render_widget(text.wrap(Wrap { trim: false }), below(area));
        }
        Some(Ok(mappings)) => {
            let rows: Vec<Vec<String>> = mappings.iter().map(cells).collect();
            draw_table(frame, below(area), &MAPPINGS, &rows, None, None);
        }
    }
}

fn cells(mapping: &Mapping) -> Vec<String> {
    let usage = &mapping.usage;
    let ratio = match usage.out_bytes {
        0 => "-".to_owned(),
        out => ratio(out, usage.stored_bytes),
    };
    vec![
        format!("{:x}", usage.start),
        bytes(usage.end.saturating_sub(usage.start)),
        bytes(usage.resident_bytes),
        bytes(usage.out_bytes),
        ratio,
        mapping.name.clone(),
    ]
}
