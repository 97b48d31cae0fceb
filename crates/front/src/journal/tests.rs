use super::{record::Rest, *};

/// A journal as this release writes it. It must not change: later builds must read it.
const RECORDED: &[u8] = include_bytes!("../../tests/journal-1.bin");

fn state() -> RecordedState {
    let entry = |note: &[u8], fds: &[RawFd]| RecordedEntry { note: note.to_vec(), fds: fds.to_vec() };
    let request = |stream, number, deaths| (stream, RecordedRequest { number, deaths });
    let listener = format!("{TASK_LISTENER}/run/task.sock");
    RecordedState {
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
                RecordedConnection {
                    fds: [11, 12, 13],
                    requests: [request(3, 4709, 1), request(5, 4701, 0)].into(),
                },
            ),
            (9, RecordedConnection { fds: [14, 15, 16], requests: BTreeMap::new() }),
        ]
        .into(),
    }
}

#[test]
fn a_recorded_journal_is_read_and_would_be_written_the_same() {
    let (file, _) = written(0, 8, &state().records()).unwrap();
    assert_eq!(RecordedState::parse(RECORDED).unwrap(), state());
    assert_eq!(file.content().unwrap(), RECORDED);
    let mut fds: Vec<_> = state().descriptors().collect();
    fds.sort_unstable();
    assert_eq!(fds, Vec::from_iter(3..=16));
}

#[test]
fn what_was_added_is_there_and_what_was_taken_back_is_not() {
    let mut journal = Journal::create("id".into()).unwrap();
    let connection = |id| {
        let connection = RecordedConnection { fds: [20, 21, 22], ..RecordedConnection::default() };
        Record::Connection { id, connection }
    };
    let entry = |key: &str| Record::Kept { key: key.into(), note: b"n".to_vec(), fds: vec![30] };
    for record in [
        connection(8),
        connection(9),
        Record::Request { connection: 8, stream: 1, number: 7 },
        Record::Deaths { connection: 8, stream: 1, deaths: 2 },
        Record::Closed(9),
        entry("a"),
        entry("b"),
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
    let recorded = RecordedState::parse(&journal.file().content().unwrap()).unwrap();
    assert_eq!(
        (recorded.reading, recorded.worker, recorded.process, recorded.basics.was_ready),
        (8, None, None, true)
    );
    assert_eq!(
        (recorded.basics.next_request, recorded.basics.reloads, recorded.basics.stayed.as_str()),
        (9, 1, "why")
    );
    assert_eq!(recorded.entries.keys().collect::<Vec<_>>(), ["b"]);
    let requests = BTreeMap::from([(1, RecordedRequest { number: 7, deaths: 2 })]);
    assert_eq!(
        recorded.connections,
        BTreeMap::from([(8, RecordedConnection { fds: [20, 21, 22], requests })])
    );

    let before = recorded.clone();
    journal.shorten().unwrap();
    let recorded = RecordedState::parse(&journal.file().content().unwrap()).unwrap();
    assert!(recorded.end < before.end);
    assert_eq!(recorded, RecordedState { generation: before.generation + 1, end: recorded.end, ..before });
    journal.add(&Record::Forgotten("b".into()));
    let recorded = RecordedState::parse(&journal.file().content().unwrap()).unwrap();
    assert!(recorded.entries.is_empty() && recorded.connections.len() == 1);
}

#[test]
fn a_journal_is_long_when_most_of_it_is_out_of_date() {
    let mut journal = Journal::create("id".into()).unwrap();
    let record = Record::Kept { key: "key".into(), note: vec![0; 30 << 10], fds: Vec::new() };
    let mut times = 0;
    while !journal.is_long() {
        journal.add(&record);
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
    let connection = RecordedConnection { fds: [11, 12, 13], ..RecordedConnection::default() };
    longer(&Record::Connection { id: 8, connection });
    bytes.extend([0, 0, 0, 3, 99, 1, 2]);
    let recorded = RecordedState::parse(&bytes).unwrap();
    assert_eq!(recorded.entries["key"], RecordedEntry { note: b"note".to_vec(), fds: vec![6] });
    assert_eq!(recorded.connections[&8].fds, [11, 12, 13]);
}

#[test]
fn a_record_that_is_not_whole_has_not_happened_and_damage_is_an_error_or_another_state() {
    for end in 0..RECORDED.len() {
        // A kill may cut any record that is the last, except the first one, which is written before anything can be
        // killed.
        let cut = RecordedState::parse(&RECORDED[..end]);
        assert!(cut.is_err() || cut.unwrap().basics == state().basics, "{end}");
    }
    for at in 0..RECORDED.len() {
        let mut bytes = RECORDED.to_vec();
        bytes[at] ^= 0xff;
        // Some changes result in other valid states.
        let _ = RecordedState::parse(&bytes);
    }
    let later = [MAGIC.as_slice(), &2_u32.to_be_bytes(), &[0; 12]].concat();
    assert_eq!(RecordedState::parse(&later), Err(JournalError::Version(2)));
    assert_eq!(RecordedState::parse(b"an initramfs"), Err(JournalError::Foreign));
}

/// The journal of a front that was killed while it wrote a record, and of its successors.
#[test]
fn a_journal_whose_last_record_was_cut_is_continued_and_read_again() {
    let entry = |key: &str| Record::Kept { key: key.into(), note: vec![7; 300], fds: Vec::new() };
    let mut cut = Vec::new();
    entry("cut").write(&mut cut);
    for length in 1..cut.len() {
        let mut journal = Journal::create("id".into()).unwrap();
        journal.add(&entry("before"));
        journal.file.write(&cut[..length], journal.end).unwrap();
        let recorded = RecordedState::parse(&journal.file.content().unwrap()).unwrap();
        let mut journal = Journal::reopen(journal.file, &recorded, journal.pipe).unwrap();
        (0..3).for_each(|n| journal.add(&entry(&format!("behind {n}"))));
        let recorded = RecordedState::parse(&journal.file.content().unwrap()).unwrap();
        assert_eq!(recorded.entries.len(), 4, "cut after {length} bytes: {:?}", recorded.entries.keys());
        journal.shorten().unwrap();
        assert_eq!(RecordedState::parse(&journal.file.content().unwrap()).unwrap().entries, recorded.entries);
    }
}

#[test]
fn what_was_recorded_and_not_made_is_dropped_and_that_is_recorded() {
    let mut recorded = state();
    let there = |fd: RawFd| ![8, 12, 10].contains(&fd);
    let lost = recorded.drop_what_is_not(there).unwrap();
    let closed = Record::Closed(8);
    assert_eq!(lost, [Record::Forgotten("exec/c1/e".into()), closed, Record::Worker(None)]);
    assert_eq!((recorded.entries.len(), recorded.connections.len(), recorded.worker), (2, 1, None));
    assert!(state().drop_what_is_not(|fd| fd != 3).is_err(), "no front without a pipe");
}
