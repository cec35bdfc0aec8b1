//! `memfold top`: the runs of this user, refreshed once a second.

use crate::arguments::TopArguments;
use crate::failure::Failure;
use crate::format::{bytes, grouped, nanoseconds, ratio};
use crate::live;
use crate::report::Snapshot;
use crate::stat::nothing_runs;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Gauge, Paragraph, Row, Sparkline, Table, TableState};
use std::collections::HashMap;
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_secs(1);
/// A run that takes longer to answer is left out of a view: keys are waited for meanwhile.
const PATIENCE: Duration = Duration::from_millis(500);
/// Seconds of history that are kept: more than a terminal is wide.
const HISTORY: usize = 512;

/// `memfold top [PID]`.
pub fn top(arguments: &TopArguments) -> Result<ExitCode, Failure> {
    if !io::stdout().is_terminal() {
        return Err(Failure::own(
            "memfold top needs a terminal on standard output; memfold stat prints the same statistics",
        ));
    }
    let mut view = View::default();
    view.refresh(live::snapshots_of(arguments.pid, live::PATIENCE));
    if view.runs.is_empty() {
        return Err(nothing_runs(arguments.pid));
    }
    let mut terminal = ratatui::try_init()
        .map_err(|error| Failure::own(format!("cannot use the terminal: {error}")))?;
    let shown = show(&mut terminal, &mut view, arguments.pid);
    ratatui::restore();
    shown.map_err(|error| Failure::own(format!("cannot use the terminal: {error}")))?;
    Ok(ExitCode::SUCCESS)
}

fn show(
    terminal: &mut ratatui::DefaultTerminal,
    view: &mut View,
    pid: Option<u32>,
) -> io::Result<()> {
    let mut next = Instant::now() + INTERVAL;
    loop {
        terminal.draw(|frame| view.draw(frame))?;
        if event::poll(next.saturating_duration_since(Instant::now()))? {
            match event::read()? {
                Event::Key(key) if ends(&key) => return Ok(()),
                Event::Key(key) if key.kind == KeyEventKind::Press => view.choose(key.code),
                _ => {}
            }
            continue;
        }
        next = Instant::now() + INTERVAL;
        view.refresh(live::snapshots_of(pid, PATIENCE));
    }
}

fn ends(key: &KeyEvent) -> bool {
    let control_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    control_c || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
}

/// Pages swapped out and in, one number a second, the latest last.
#[derive(Debug, Default)]
struct Traffic {
    out: Vec<u64>,
    back: Vec<u64>,
}

/// What is on the screen.
#[derive(Debug, Default)]
struct View {
    runs: Vec<Snapshot>,
    traffic: HashMap<u32, Traffic>,
    chosen: TableState,
}

impl View {
    fn refresh(&mut self, runs: Vec<Snapshot>) {
        for run in &runs {
            let before = self.runs.iter().find(|before| before.pid == run.pid);
            let Some(before) = before else { continue };
            let traffic = self.traffic.entry(run.pid).or_default();
            push(
                &mut traffic.out,
                run.statistics.totals.pages_out,
                before.statistics.totals.pages_out,
            );
            push(
                &mut traffic.back,
                run.statistics.totals.pages_in,
                before.statistics.totals.pages_in,
            );
        }
        self.traffic
            .retain(|pid, _| runs.iter().any(|run| run.pid == *pid));
        self.runs = runs;
        let last = self.runs.len().checked_sub(1);
        self.chosen
            .select(last.map(|last| self.chosen.selected().unwrap_or(0).min(last)));
    }

    fn choose(&mut self, key: KeyCode) {
        match key {
            KeyCode::Up | KeyCode::Char('k') => self.chosen.select_previous(),
            KeyCode::Down | KeyCode::Char('j') => {
                let next = self.chosen.selected().map_or(0, |row| row + 1);
                self.chosen
                    .select(Some(next.min(self.runs.len().saturating_sub(1))));
            }
            _ => {}
        }
    }

    fn draw(&mut self, frame: &mut Frame<'_>) {
        let rows = self.runs.len().min(100) as u16;
        let [list, detail, help] = Layout::vertical([
            Constraint::Length((rows + 1).clamp(2, 12)),
            Constraint::Min(0),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        self.draw_list(frame, list);
        if let Some(run) = self.chosen.selected().and_then(|row| self.runs.get(row)) {
            let none = Traffic::default();
            draw_run(
                frame,
                detail,
                run,
                self.traffic.get(&run.pid).unwrap_or(&none),
            );
        } else {
            frame.render_widget(
                Paragraph::new("Nothing runs under memfold any more."),
                detail,
            );
        }
        let style = Style::new().add_modifier(Modifier::DIM);
        frame.render_widget(
            Paragraph::new("q quits   ↑ ↓ choose a run").style(style),
            help,
        );
    }

    fn draw_list(&mut self, frame: &mut Frame<'_>, area: Rect) {
        let header = [
            "PID",
            "HELD",
            "LIMIT",
            "OUT",
            "IN",
            "P99",
            "PROCESSES",
            "COMMAND",
        ];
        let widths = [8, 10, 10, 12, 12, 9, 9].map(Constraint::Length);
        let widths = widths.into_iter().chain([Constraint::Min(10)]);
        let table = Table::new(self.runs.iter().map(row), widths)
            .header(Row::new(header).style(Style::new().add_modifier(Modifier::BOLD)))
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
        frame.render_stateful_widget(table, area, &mut self.chosen);
    }
}

fn push(history: &mut Vec<u64>, now: u64, before: u64) {
    // Multiplied when it is drawn; no honest run has more.
    const MOST: u64 = 1 << 40;
    history.push(now.saturating_sub(before).min(MOST));
    let surplus = history.len().saturating_sub(HISTORY);
    history.drain(..surplus);
}

fn row(run: &Snapshot) -> Row<'static> {
    let (held, limit) = run.limit();
    Row::new([
        run.pid.to_string(),
        bytes(held),
        bytes(limit),
        grouped(run.statistics.totals.pages_out),
        grouped(run.statistics.totals.pages_in),
        nanoseconds(run.statistics.fault_ns.p99),
        run.now.processes_now.to_string(),
        run.command.clone(),
    ])
}

fn draw_run(frame: &mut Frame<'_>, area: Rect, run: &Snapshot, traffic: &Traffic) {
    let [_, gauge, text, out, back] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(6),
        Constraint::Fill(1),
        Constraint::Fill(1),
    ])
    .areas(area);
    let (held, limit) = run.limit();
    let share = if limit == 0 {
        0.0
    } else {
        (held as f64 / limit as f64).min(1.0)
    };
    frame.render_widget(
        Gauge::default()
            .ratio(share)
            .label(format!("{} of {}", bytes(held), bytes(limit)))
            .gauge_style(Style::new().fg(if held > limit {
                Color::Red
            } else {
                Color::Green
            })),
        gauge,
    );
    frame.render_widget(Paragraph::new(lines(run)), text);
    sparkline(
        frame,
        out,
        "pages out a second",
        &traffic.out,
        Color::Yellow,
    );
    sparkline(frame, back, "pages in a second", &traffic.back, Color::Cyan);
}

fn lines(run: &Snapshot) -> Vec<Line<'static>> {
    let statistics = &run.statistics;
    let packed = ratio(
        statistics.totals.bytes_original,
        statistics.totals.bytes_stored,
    )
    .map(|ratio| format!(" at {ratio}"))
    .unwrap_or_default();
    vec![
        Line::default(),
        Line::from(format!(
            "resident {} (peak {})   pool {}{packed} (peak {})   metadata {}",
            bytes(run.now.resident_bytes),
            bytes(statistics.totals.peak_resident_bytes),
            bytes(run.now.pool_bytes),
            bytes(statistics.totals.peak_pool_bytes),
            bytes(run.now.metadata_bytes),
        )),
        Line::from(format!(
            "faults: {} swapped in, {} first touches, {} still staged",
            grouped(statistics.totals.faults_swap_in),
            grouped(statistics.totals.faults_zero_fill),
            grouped(statistics.totals.faults_cache),
        )),
        Line::from(format!(
            "fault service: p50 {}   p90 {}   p99 {}   longest {}",
            nanoseconds(statistics.fault_ns.p50),
            nanoseconds(statistics.fault_ns.p90),
            nanoseconds(statistics.fault_ns.p99),
            nanoseconds(statistics.fault_ns.max),
        )),
        Line::from(format!(
            "processes: {} now, {} so far, {} not under the limit   memfold's CPU time: {:.1} s in {:.0} s",
            run.now.processes_now,
            statistics.totals.processes,
            statistics.processes_unmanaged,
            statistics.cpu_seconds,
            run.uptime_seconds,
        )),
    ]
}

fn sparkline(frame: &mut Frame<'_>, area: Rect, title: &str, history: &[u64], color: Color) {
    let latest = history.last().copied().unwrap_or(0);
    let block = Block::default().title(format!("{title}: {}", grouped(latest)));
    let shown = history.len().saturating_sub(usize::from(area.width));
    let line = Sparkline::default().data(&history[shown..]).block(block);
    frame.render_widget(line.style(Style::new().fg(color)), area);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Statistics;
    use memfold_pager::{Now, Stats, Totals};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn run(pid: u32, pages_out: u64) -> Snapshot {
        let stats = Stats {
            totals: Totals {
                limit_bytes: 1 << 30,
                pages_out,
                ..Totals::default()
            },
            ..Stats::default()
        };
        Snapshot {
            pid,
            program_pid: pid + 1,
            command: format!("program-{pid}"),
            uptime_seconds: 12.0,
            now: Now {
                resident_bytes: 256 << 20,
                pool_bytes: 128 << 20,
                metadata_bytes: 1 << 20,
                processes_now: 1,
                ..Now::default()
            },
            programs: Vec::new(),
            statistics: Statistics::new(&stats, 0.5, 0),
        }
    }

    fn screen(view: &mut View) -> String {
        let mut terminal = Terminal::new(TestBackend::new(100, 24)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn runs_and_the_chosen_one_are_shown() {
        let mut view = View::default();
        view.refresh(vec![run(100, 1000), run(200, 0)]);
        view.refresh(vec![run(100, 6500), run(200, 0)]);
        let text = screen(&mut view);
        assert!(
            text.contains("program-100") && text.contains("program-200"),
            "{text}"
        );
        assert!(text.contains("385 MiB of 1.0 GiB"), "{text}");
        assert!(text.contains("pages out a second: 5,500"), "{text}");
        view.choose(KeyCode::Down);
        assert!(screen(&mut view).contains("pages out a second: 0"));
        view.choose(KeyCode::Down);
        assert_eq!(view.chosen.selected(), Some(1));
    }

    #[test]
    fn an_ended_run_leaves_the_screen() {
        let mut view = View::default();
        view.refresh(vec![run(100, 0)]);
        view.refresh(Vec::new());
        assert!(screen(&mut view).contains("Nothing runs"));
        assert!(view.traffic.is_empty());
    }
}
