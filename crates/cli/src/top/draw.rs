//! Drawing a view at any size.

use super::columns::{first_that_fits, flowed, wrapped};
use super::details::parts;
use super::limit_dialog::LimitDialog;
use super::tables::{INSTANCES, draw_mappings, draw_programs, draw_table};
use super::view::{Detail, Traffic, View, short_title};
use crate::format::{bytes, grouped, nanoseconds};
use crate::instance::Instance;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Clear, Gauge, Paragraph, Sparkline, Wrap};

const HELP: [&str; 13] = [
    "up, down, j, k  choose one",
    "s  sort by the next column",
    "r  sort the other way round",
    "p  programs of a run, and back",
    "m  mappings of a program",
    "Enter  the next of these",
    "l  change the limit",
    "+, -  by a tenth",
    "?, h  this help",
    "q, Esc  quit",
    "USED counts towards LIMIT",
    "OUT, IN: pages or blocks a second",
    "P99: 99 % of faults were faster",
];

impl View {
    /// Draws it.
    pub fn draw(&self, frame: &mut Frame<'_>) {
        let rows = self.instances.len().min(100) as u16;
        let (words, is_urgent) = self.words(frame.area().width.into());
        let [list, detail, keys] = Layout::vertical([
            Constraint::Length((rows + 1).clamp(2, 12)),
            Constraint::Min(0),
            Constraint::Length(words.len() as u16),
        ])
        .areas(frame.area());
        if let Some(chosen) = self.place().map(|row| &self.instances[row]) {
            self.draw_list(frame, list);
            match (self.detail, chosen) {
                (Detail::Programs, Instance::Run(run)) => draw_programs(frame, detail, self, run),
                (Detail::Mappings, Instance::Run(_)) => draw_mappings(frame, detail, self),
                _ => {
                    let none = Traffic::default();
                    let traffic = self.traffic.get(&chosen.pid()).unwrap_or(&none);
                    draw_statistics(frame, detail, chosen, traffic);
                }
            }
        } else {
            let text = "Nothing runs under memfold, and no disk is served. Waiting: start a program with\n\n  memfold run \
                        --limit 2G -- PROGRAM";
            let area = frame.area();
            let text = Paragraph::new(text).wrap(Wrap { trim: false });
            frame.render_widget(
                text,
                Rect {
                    height: area.height.saturating_sub(1),
                    ..area
                },
            );
        }
        let modifier = if is_urgent {
            Modifier::BOLD
        } else {
            Modifier::DIM
        };
        let lines: Vec<Line<'_>> = words.into_iter().map(Line::from).collect();
        let style = Style::new().add_modifier(modifier);
        frame.render_widget(Paragraph::new(lines).style(style), keys);
        if self.helps {
            draw_help(frame);
        }
    }

    /// The last lines: what is asked, what came of that, or the keys; and whether that is important.
    fn words(&self, width: usize) -> (Vec<String>, bool) {
        let asked = self.dialog.as_ref().map(LimitDialog::text);
        let texts: Vec<String> = self.notice.iter().cloned().chain(asked).collect();
        if !texts.is_empty() {
            let lines = texts.iter().flat_map(|text| wrapped(text, width));
            return (lines.collect(), true);
        }
        let texts = [
            "q quits   ? help   ↑ ↓ choose   s sort   p programs   m mappings   l limit".to_owned(),
            "q quits   ? help".to_owned(),
            "q  ?".to_owned(),
        ];
        let keys = first_that_fits(&texts, width).to_owned();
        (vec![keys], false)
    }

    fn draw_list(&self, frame: &mut Frame<'_>, area: Rect) {
        let rows: Vec<Vec<String>> = self.instances.iter().map(|one| self.cells(one)).collect();
        let sorted = Some(self.order.title());
        let place = self.place();
        draw_table(
            frame,
            area,
            &INSTANCES,
            &rows,
            sorted.zip(Some(self.is_reversed)),
            place,
        );
    }

    fn cells(&self, instance: &Instance) -> Vec<String> {
        let (held, limit) = instance.limit();
        let traffic = self.traffic.get(&instance.pid());
        let (out, back) = traffic.map_or((0, 0), Traffic::latest);
        let (p99, programs) = match instance {
            Instance::Run(run) => (
                nanoseconds(run.statistics.fault_ns.p99),
                run.now.processes_now.to_string(),
            ),
            Instance::Disk(_) => ("-".to_owned(), "-".to_owned()),
        };
        vec![
            instance.pid().to_string(),
            bytes(held),
            bytes(limit),
            grouped(out),
            grouped(back),
            p99,
            programs,
            short_title(instance),
        ]
    }
}

fn draw_help(frame: &mut Frame<'_>) {
    let area = frame.area();
    let longest = HELP.iter().map(|line| line.len()).max().unwrap_or(0) as u16;
    let (width, height) = (
        (longest + 4).min(area.width),
        (HELP.len() as u16 + 2).min(area.height),
    );
    let middle = Rect {
        x: (area.width - width) / 2,
        y: (area.height - height) / 2,
        width,
        height,
    };
    let text: Vec<Line<'_>> = HELP.iter().map(|line| Line::from(*line)).collect();
    frame.render_widget(Clear, middle);
    let block = Block::bordered().title("memfold top");
    frame.render_widget(Paragraph::new(text).block(block), middle);
}

fn draw_statistics(frame: &mut Frame<'_>, area: Rect, instance: &Instance, traffic: &Traffic) {
    let lines = flowed(&parts(instance), area.width.into());
    let [_, gauge, _, text, out, back] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(lines.len() as u16),
        Constraint::Fill(1),
        Constraint::Fill(1),
    ])
    .areas(area);
    let (held, limit) = instance.limit();
    let share = if limit == 0 {
        0.0
    } else {
        (held as f64 / limit as f64).min(1.0)
    };
    let labels = [format!("{} of {}", bytes(held), bytes(limit)), bytes(held)];
    frame.render_widget(
        Gauge::default()
            .ratio(share)
            .label(first_that_fits(&labels, gauge.width.into()).to_owned())
            .gauge_style(Style::new().fg(if held > limit {
                Color::Red
            } else {
                Color::Green
            })),
        gauge,
    );
    let lines: Vec<Line<'_>> = lines.into_iter().map(Line::from).collect();
    frame.render_widget(Paragraph::new(lines), text);
    let [leaving, returning] = match instance {
        Instance::Run(_) => ["pages out", "pages in"],
        Instance::Disk(_) => ["blocks written", "blocks read"],
    };
    sparkline(frame, out, leaving, &traffic.out, Color::Yellow);
    sparkline(frame, back, returning, &traffic.back, Color::Cyan);
}

fn sparkline(frame: &mut Frame<'_>, area: Rect, what: &str, history: &[u64], color: Color) {
    let latest = grouped(history.last().copied().unwrap_or(0));
    let shown = &history[history.len().saturating_sub(usize::from(area.width))..];
    let most = shown.iter().copied().max().unwrap_or(0).max(1);
    let texts = [
        format!(
            "{what} a second: {latest}   (full height: {})",
            grouped(most)
        ),
        format!("{what}/s: {latest} of {}", grouped(most)),
        format!("{what} {latest}"),
    ];
    let block = Block::default().title(first_that_fits(&texts, area.width.into()).to_owned());
    let line = Sparkline::default().data(shown).max(most).block(block);
    frame.render_widget(line.style(Style::new().fg(color)), area);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk_report::{DiskSnapshot, DiskStatistics};
    use crate::report::{Programs, Snapshot, Statistics};
    use crate::top::mappings::Mapping;
    use memfold_disk::DiskUsage;
    use memfold_pager::{MappingUsage, Now, ProgramUsage, Stats, Totals};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::KeyCode;
    use std::collections::BTreeSet;

    fn run(pid: u32, pages_out: u64) -> Instance {
        let stats = Stats {
            totals: Totals {
                limit_bytes: 1 << 30,
                pages_out,
                ..Totals::default()
            },
            ..Stats::default()
        };
        let run = Snapshot {
            pid,
            program_pid: pid + 1,
            command: format!("/a/long/folder/of/the/interpreter/program-{pid} -x /b/c"),
            uptime_seconds: 12.0,
            now: Now {
                resident_bytes: 256 << 20,
                pool_bytes: 128 << 20,
                metadata_bytes: u64::from(pid) << 14,
                processes_now: 1,
                ..Now::default()
            },
            programs: vec![ProgramUsage {
                pid: 4_194_303,
                resident_bytes: 256 << 20,
                staged_bytes: 0,
                pool_bytes: 128 << 20,
                file_bytes: 0,
                remote_bytes: 0,
            }],
            statistics: Statistics::new(&stats, 0.5, 0, Programs::default()),
        };
        run.into()
    }

    fn screen(view: &View, width: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, 24)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    fn view() -> View {
        let mut view = View::default();
        view.refresh(vec![run(100, 1000), run(200, 0)]);
        view.refresh(vec![run(100, 1_592_394), run(200, 0)]);
        view
    }

    #[test]
    fn runs_and_the_chosen_one_are_shown() {
        let mut view = view();
        let text = screen(&view, 100);
        assert!(
            text.contains("program-100 -x /b/c") && text.contains("program-200"),
            "{text}"
        );
        assert!(text.contains("386 MiB of 1.0 GiB"), "{text}");
        assert!(text.contains("pages out a second: 1,591,394"), "{text}");
        assert!(text.contains("full height: 1,591,394"), "{text}");
        view.press(KeyCode::Down);
        assert!(screen(&view, 100).contains("pages out a second: 0"));
        view.press(KeyCode::Down);
        assert_eq!(view.chosen, Some(200));
    }

    /// All numbers on a screen.
    fn numbers(text: &str) -> BTreeSet<String> {
        let is_part = |letter: char| letter.is_ascii_digit() || ",.:".contains(letter);
        let words = text.split(|letter| !is_part(letter));
        let words = words.map(|word| word.trim_matches([',', '.', ':']).to_owned());
        words.filter(|word| !word.is_empty()).collect()
    }

    #[test]
    fn no_number_is_cut_at_any_width() {
        let mut view = view();
        // A command may be cut.
        for instance in &mut view.instances {
            instance.map_text(|_| "program".to_owned());
        }
        let usage = MappingUsage {
            start: 0x7f2c_4000_0000,
            end: 0x7f2c_8000_0000,
            resident_bytes: 256 << 20,
            out_bytes: 345 << 20,
            stored_bytes: 123 << 20,
        };
        let name = "anonymous".to_owned();
        let mappings = vec![Mapping { usage, name }];
        for page in 0..3 {
            if page == 2 {
                view.mappings = Some(Ok(mappings.clone()));
                assert!(screen(&view, 100).contains("2.8:1"));
                assert!(screen(&view, 30).contains("345 MiB"));
            }
            let whole = numbers(&screen(&view, 250));
            for width in (1..60).chain((60..220).step_by(9)) {
                let text = screen(&view, width);
                let wrong: Vec<_> = numbers(&text).difference(&whole).cloned().collect();
                assert!(wrong.is_empty(), "{width}, page {page}: {wrong:?}: {text}");
            }
            view.press(KeyCode::Enter);
        }
        assert!(screen(&view, 30).contains("386 MiB"));
    }

    #[test]
    fn programs_have_no_size_that_would_count_compressed_pages() {
        let mut view = view();
        view.press(KeyCode::Enter);
        let text = screen(&view, 100);
        let row = text.lines().find(|line| line.contains("4194303"));
        let row = row.expect("the program");
        assert!(row.contains("256 MiB") && row.contains("128 MiB"), "{text}");
        assert!(!row.contains("384 MiB"), "{text}");
    }

    #[test]
    fn disks_stand_beside_runs() {
        let disk = |written_bytes| {
            let mut usage = DiskUsage::default();
            usage.written_bytes = written_bytes;
            usage.used_bytes = 300 << 20;
            usage.limit_bytes = 1 << 30;
            usage.size_bytes = 16 << 30;
            let statistics = DiskStatistics {
                usage,
                ..DiskStatistics::default()
            };
            Instance::from(DiskSnapshot {
                pid: 300,
                address: "nbd+unix:///?socket=/run/d.sock".to_owned(),
                statistics,
                ..DiskSnapshot::default()
            })
        };
        let mut view = view();
        view.refresh(vec![run(100, 0), disk(0)]);
        view.refresh(vec![run(100, 0), disk(4096 * 777)]);
        view.press(KeyCode::Down);
        view.press(KeyCode::Char('+'));
        assert!(screen(&view, 120).contains("a disk's limit is set when it starts"));
        view.press(KeyCode::Home);
        let text = screen(&view, 120);
        assert!(
            text.contains("disk nbd+unix:///?socket=/run/d.sock"),
            "{text}"
        );
        assert!(text.contains("300 MiB of 1.0 GiB"), "{text}");
        assert!(text.contains("blocks written a second: 777"), "{text}");
        // It has no programs.
        view.press(KeyCode::Enter);
        assert_eq!(screen(&view, 120), text);
    }

    #[test]
    fn keys_sort_help_and_end() {
        let mut view = view();
        assert!(screen(&view, 100).contains("PID▾"));
        assert!(view.press(KeyCode::Char('s')));
        let text = screen(&view, 100);
        assert!(text.contains("USED▾"), "{text}");
        assert_eq!(view.instances[0].pid(), 200);
        view.press(KeyCode::Char('s'));
        assert_eq!(view.instances[0].pid(), 100);
        view.press(KeyCode::Char('r'));
        assert_eq!(view.instances[0].pid(), 200);
        assert_eq!(view.chosen, Some(100), "the same run stays chosen");
        view.press(KeyCode::Char('?'));
        for width in [30, 60, 200] {
            assert!(screen(&view, width).contains("q, Esc  quit"));
        }
        assert!(view.press(KeyCode::Char('q')), "closes the help");
        view.press(KeyCode::Char('p'));
        assert!(screen(&view, 100).contains("RESIDENT"));
        assert!(view.press(KeyCode::Esc));
        assert!(!view.press(KeyCode::Esc));
        assert!(!view.press(KeyCode::Char('q')));
    }

    fn typed(view: &mut View, keys: &str) {
        for key in keys.chars() {
            let key = match key {
                '\n' => KeyCode::Enter,
                '<' => KeyCode::Backspace,
                key => KeyCode::Char(key),
            };
            assert!(view.press(key), "{key}");
        }
    }

    #[test]
    fn a_limit_changes_only_once_that_is_confirmed() {
        let mut view = view();
        typed(&mut view, "l51<2q");
        let text = screen(&view, 60);
        assert!(text.contains("new limit of run 100 instead of"), "{text}");
        assert!(text.contains("52q_"), "{text}");
        typed(&mut view, "\n");
        assert!(screen(&view, 100).contains("a size is a number with K, M"));
        typed(&mut view, "<M\n");
        assert!(screen(&view, 100).contains("from 1.0 GiB to 52.0 MiB? y/n"));
        assert_eq!(view.confirmed, None);
        typed(&mut view, "n");
        assert_eq!(view.confirmed, None);
        assert!(screen(&view, 30).contains("no limit is changed"));
        typed(&mut view, "l50%\ny");
        let change = view.confirmed.take().expect("a change");
        assert_eq!(
            (change.pid, change.size.as_str(), change.resident),
            (100, "50%", false)
        );
        typed(&mut view, "-");
        assert!(screen(&view, 30).contains("y/n"));
        assert!(screen(&view, 100).contains("from 1.0 GiB to 922 MiB? y/n"));
        typed(&mut view, "y");
        assert_eq!(view.confirmed.take().expect("a change").size, "922M");
        assert!(view.press(KeyCode::Char('l')) && view.press(KeyCode::Esc));
        assert!(view.dialog.is_none() && view.confirmed.is_none());
    }

    #[test]
    fn mappings_are_those_of_the_chosen_program() {
        let mut view = view();
        for instance in &mut view.instances {
            if let Instance::Run(run) = instance {
                let mut smaller = run.programs[0];
                (smaller.pid, smaller.resident_bytes) = (7, 5 << 20);
                run.programs.push(smaller);
            }
        }
        assert_eq!(view.chosen_program(), Some((0, 4_194_303)));
        typed(&mut view, "pj");
        assert_eq!(view.chosen_program(), Some((1, 7)));
        assert_eq!(view.chosen, Some(100), "the run stays chosen");
        typed(&mut view, "\n");
        assert_eq!(view.detail, Detail::Mappings);
        assert!(screen(&view, 60).contains("PID 7"));
        view.mappings = Some(Err("it is ending".to_owned()));
        assert!(screen(&view, 60).contains("They are not known: it is ending"));
        view.press(KeyCode::Char('m'));
        assert!(view.mappings.is_none(), "asked for anew");
        view.press(KeyCode::Down);
        assert_eq!((view.chosen, view.program), (Some(200), None));
    }

    #[test]
    fn without_a_run_it_waits() {
        let mut view = View::default();
        view.refresh(vec![run(100, 0)]);
        view.refresh(Vec::new());
        for width in [30, 100] {
            assert!(screen(&view, width).contains("Nothing runs"));
        }
        assert!(view.traffic.is_empty() && view.chosen.is_none());
        assert!(view.press(KeyCode::Down) && view.press(KeyCode::Enter));
        view.refresh(vec![run(7, 0)]);
        assert_eq!(view.chosen, Some(7));
    }
}
