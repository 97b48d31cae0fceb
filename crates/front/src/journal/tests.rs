use super::{record::Rest, *};

/// A journal as this release writes it. It must not change: later builds must read it.
const RECORDED: &[u8] = include_bytes!("../../tests/journal-1.bin");

fn state() -> Held {
    let entry = |note: &[u8], fds: &[RawFd]| HeldEntry { note: note.to_vec(), fds: fds.to_vec() };
    let request = |stream, number, deaths| (stream, HeldRequest { number, deaths });
    let listener = format!("{TASK_LISTENER}/run/task.sock");
    Held {
        basics: Basics {
            identity: "17-1700000000000000000".into(),
            was_ready: true,
            next_request: 4711,
            pipe: [3, 4],
            reloads: 2,
            stayed: "cannot run it".into(),
        },
        reading: 8,
        worker: Some(10),
        process: None,
        generation: 0,
        end: RECORDED.len() as u64,
        listener: listener.clone(),
        entries: [
            (listener, entry(b"", &[5])),
            (format!("{TASK_LISTENER}/run/z"), entry(b"", &[6])),
            ("exec/c1/e".into(), entry(b"{}", &[7, 8, 9])),
        ]
        .into(),
        connections: [
            (
                8,
                HeldConnection {
                    fds: [11, 12, 13],
                    requests: [request(3, 4709, 1), request(5, 4701, 0)].into(),
                },
            ),
            (9, HeldConnection { fds: [14, 15, 16], requests: BTreeMap::new() }),
        ]
        .into(),
    }
}

#[test]
fn a_recorded_journal_is_read_and_would_be_written_the_same() {
    let (file, _) = written(0, 8, &state().records()).unwrap();
    assert_eq!(Held::of(RECORDED).unwrap(), state());
    assert_eq!(file.content().unwrap(), RECORDED);
    let mut fds: Vec<_> = state().descriptors().collect();
    fds.sort_unstable();
    assert_eq!(fds, Vec::from_iter(3..=16));
}

#[test]
fn what_was_added_is_there_and_what_was_taken_back_is_not() {
    let mut journal = Journal::create("id".into()).unwrap();
    let connection = |id| {
        let of = HeldConnection { fds: [20, 21, 22], ..HeldConnection::default() };
        Record::Connection { id, of }
    };
    let kept = |key: &str| Record::Kept { key: key.into(), note: b"n".to_vec(), fds: vec![30] };
    for record in [
        connection(8),
        connection(9),
        Record::Request { connection: 8, stream: 1, number: 7 },
        Record::Deaths { connection: 8, stream: 1, deaths: 2 },
        Record::Closed(9),
        kept("a"),
        kept("b"),
        Record::Forgotten("a".into()),
        Record::Ready,
        Record::Worker(Some(40)),
        Record::Process(41),
        Record::Worker(None),
        Record::Reloaded("why".into()),
    ] {
        journal.add(&record);
    }
    journal.pipe_of(8);
    let held = Held::of(&journal.file().content().unwrap()).unwrap();
    assert_eq!((held.reading, held.worker, held.process, held.basics.was_ready), (8, None, None, true));
    assert_eq!((held.basics.next_request, held.basics.reloads, held.basics.stayed.as_str()), (9, 1, "why"));
    assert_eq!(held.entries.keys().collect::<Vec<_>>(), ["b"]);
    let requests = BTreeMap::from([(1, HeldRequest { number: 7, deaths: 2 })]);
    assert_eq!(held.connections, BTreeMap::from([(8, HeldConnection { fds: [20, 21, 22], requests })]));

    let before = held.clone();
    journal.shorten().unwrap();
    let held = Held::of(&journal.file().content().unwrap()).unwrap();
    assert!(held.end < before.end);
    assert_eq!(held, Held { generation: before.generation + 1, end: held.end, ..before });
    journal.add(&Record::Forgotten("b".into()));
    let held = Held::of(&journal.file().content().unwrap()).unwrap();
    assert!(held.entries.is_empty() && held.connections.len() == 1);
}

#[test]
fn a_journal_is_long_when_most_of_it_is_out_of_date() {
    let mut journal = Journal::create("id".into()).unwrap();
    let kept = Record::Kept { key: "key".into(), note: vec![0; 30 << 10], fds: Vec::new() };
    let mut times = 0;
    while !journal.is_long() {
        journal.add(&kept);
        times += 1;
    }
    assert_eq!(times, 3);
    journal.shorten().unwrap();
    assert!(!journal.is_long());
}

#[test]
fn records_and_fields_of_a_later_release_are_skipped() {
    let mut bytes = [MAGIC.as_slice(), &VERSION.to_be_bytes(), &[0; 12]].concat();
    let mut longer = |record: &Record| {
        let mut one = Vec::new();
        record.write(&mut one);
        let one = [Rest(&one).blob().unwrap(), b"a field of a later release"].concat();
        bytes.extend(u32::try_from(one.len()).unwrap().to_be_bytes());
        bytes.extend(one);
    };
    longer(&Record::Front(Basics { pipe: [3, 4], ..Basics::default() }));
    longer(&Record::Kept { key: "key".into(), note: b"note".to_vec(), fds: vec![6] });
    let of = HeldConnection { fds: [11, 12, 13], ..HeldConnection::default() };
    longer(&Record::Connection { id: 8, of });
    bytes.extend([0, 0, 0, 3, 99, 1, 2]);
    let held = Held::of(&bytes).unwrap();
    assert_eq!(held.entries["key"], HeldEntry { note: b"note".to_vec(), fds: vec![6] });
    assert_eq!(held.connections[&8].fds, [11, 12, 13]);
}

#[test]
fn a_record_that_is_not_whole_has_not_happened_and_damage_is_an_error_or_another_state() {
    for end in 0..RECORDED.len() {
        // A kill may cut any record that is the last, except the first one, which is written before anything can be
        // killed.
        let cut = Held::of(&RECORDED[..end]);
        assert!(cut.is_err() || cut.unwrap().basics == state().basics, "{end}");
    }
    for at in 0..RECORDED.len() {
        let mut bytes = RECORDED.to_vec();
        bytes[at] ^= 0xff;
        // Some changes result in other valid states.
        let _ = Held::of(&bytes);
    }
    let later = [MAGIC.as_slice(), &2_u32.to_be_bytes(), &[0; 12]].concat();
    assert_eq!(Held::of(&later), Err(JournalError::Version(2)));
    assert_eq!(Held::of(b"an initramfs"), Err(JournalError::Foreign));
}

/// The journal of a front that was killed while it wrote a record, and of its successors.
#[test]
fn a_journal_whose_last_record_was_cut_is_continued_and_read_again() {
    let kept = |key: &str| Record::Kept { key: key.into(), note: vec![7; 300], fds: Vec::new() };
    let mut cut = Vec::new();
    kept("cut").write(&mut cut);
    for length in 1..cut.len() {
        let mut journal = Journal::create("id".into()).unwrap();
        journal.add(&kept("before"));
        journal.file.write(&cut[..length], journal.end).unwrap();
        let held = Held::of(&journal.file.content().unwrap()).unwrap();
        let mut journal = Journal::reopen(journal.file, &held, journal.pipe).unwrap();
        (0..3).for_each(|n| journal.add(&kept(&format!("behind {n}"))));
        let held = Held::of(&journal.file.content().unwrap()).unwrap();
        assert_eq!(held.entries.len(), 4, "cut after {length} bytes: {:?}", held.entries.keys());
        journal.shorten().unwrap();
        assert_eq!(Held::of(&journal.file.content().unwrap()).unwrap().entries, held.entries);
    }
}

#[test]
fn what_was_recorded_and_not_made_is_dropped_and_that_is_recorded() {
    let mut held = state();
    let there = |fd: RawFd| ![8, 12, 10].contains(&fd);
    let lost = held.drop_what_is_not(there).unwrap();
    let closed = Record::Closed(8);
    assert_eq!(lost, [Record::Forgotten("exec/c1/e".into()), closed, Record::Worker(None)]);
    assert_eq!((held.entries.len(), held.connections.len(), held.worker), (2, 1, None));
    assert!(state().drop_what_is_not(|fd| fd != 3).is_err(), "no front without a pipe");
}
