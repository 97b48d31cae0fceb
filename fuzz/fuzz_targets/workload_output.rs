//! What tools print in a container, which a guest can change as it likes: logs, figures and facts. The first byte chooses the tool.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandboxer_bench::workload::output;
use sandboxer_probe::log::Printed;
use sandboxer_probe::workload::definition::Format;
use sandboxer_probe::workload::facts::{self, Facts};
use sandboxer_probe::workload::report;

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, rest)) = bytes.split_first() else { return };
    let text = String::from_utf8_lossy(rest);
    let printed = Printed::parse(&text);
    let said = printed.last_words();
    assert!(said.chars().count() <= 300 && !said.chars().any(char::is_control), "{said:?}");
    let format = Format::ALL[usize::from(*choice) % Format::ALL.len()];
    for output in [&*text, &printed.stdout] {
        if let Ok(figures) = output::parse(format, output) {
            assert!(figures.values().all(|figure| figure.is_finite() && *figure >= 0.0), "{figures:?}");
        }
    }
    for stderr in [&*text, &printed.stderr] {
        if let Some(facts) = Facts::find(stderr) {
            assert!(facts::threads([&facts]) >= 1);
            let _ = facts.differs(&facts);
        }
    }
    if let Ok(read) = report::parse(&text) {
        let written = report::render(&read).expect("a result that was read can be written");
        let again = report::parse(&written).expect("a result that was written can be read");
        assert_eq!(report::render(&again).expect("and written again"), written);
    }
});
