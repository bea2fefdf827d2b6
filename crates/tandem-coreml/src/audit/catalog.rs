//! What each generation of the engine can do with an operator, as measured by others (`catalog.tsv`).

use std::collections::HashMap;
use std::sync::LazyLock;

use super::Chip;

/// How an operator of an ML Program gets to the engine of one generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// Compiled from the program.
    Native,
    /// Only by a private net made by hand.
    Bridge,
    /// Not at all.
    Walled,
    /// Nobody says.
    Silent,
}

/// How a program of this one operator fared on an M5 Pro.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sweep {
    /// Compiled and ran.
    Ran,
    /// Did not compile.
    Refused,
    /// Not tried.
    Untried,
}

/// What is known of an operator.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    /// M1, M2, M3, then M4 and M5.
    reach: [Reach; 4],
    pub sweep: Sweep,
}

impl Entry {
    pub fn reach(&self, chip: Chip) -> Reach {
        self.reach[(chip as usize).min(3)]
    }
}

const TABLE: &str = include_str!("catalog.tsv");

static ENTRIES: LazyLock<HashMap<&'static str, Entry>> = LazyLock::new(|| rows().collect());

fn rows() -> impl Iterator<Item = (&'static str, Entry)> {
    TABLE.lines().filter(|line| !line.starts_with('#')).map(|line| {
        let mut fields = line.split('\t');
        let mut field = || fields.next().unwrap_or_default();
        let op = field();
        let reach = std::array::from_fn(|_| match field() {
            "native" => Reach::Native,
            "bridge" => Reach::Bridge,
            "walled" => Reach::Walled,
            _ => Reach::Silent,
        });
        let sweep = match field() {
            "reachable" | "reachable+correct" => Sweep::Ran,
            "not-implemented-on-ANE" | "compile-walled" => Sweep::Refused,
            _ => Sweep::Untried,
        };
        (op, Entry { reach, sweep })
    })
}

/// What is known of an operator; nothing of one that the catalogue does not name.
pub(super) fn find(op: &str) -> Option<Entry> {
    ENTRIES.get(op).copied()
}

/// Every operator that did not compile.
#[cfg(test)]
pub(super) fn refused() -> impl Iterator<Item = &'static str> {
    rows().filter(|(_, entry)| entry.sweep == Sweep::Refused).map(|(op, _)| op)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_whole() {
        for line in TABLE.lines().filter(|line| !line.starts_with('#')) {
            let fields: Vec<&str> = line.split('\t').collect();
            assert_eq!(fields.len(), 6, "{line}");
            assert!(fields[1..5].iter().all(|f| ["native", "bridge", "walled", "-"].contains(f)), "{line}");
        }
        assert_eq!(rows().count(), ENTRIES.len(), "an operator stands twice");
        assert_eq!(find("topk").unwrap().reach(Chip::M1), Reach::Walled);
        assert_eq!(find("topk").unwrap().reach(Chip::M5), Reach::Native);
        assert_eq!(find("gather").unwrap().sweep, Sweep::Refused);
        assert!(find("no_such_op").is_none());
    }
}
