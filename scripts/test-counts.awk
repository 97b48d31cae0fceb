# Counts the tests in the output of `cargo test` and of scripts/cargo-test.sh: prints how many passed, failed and were ignored.
# A test that was run again counts once, by how it ended.
/^cargo-test\.sh: .* failed; running it again alone$/ { is_again = 1 }
/^cargo-test\.sh: .* failed twice$/ { is_again = 0 }
/^cargo-test\.sh: unsteady, passed alone: / { is_again = 0; passed += NF - 4; failed -= NF - 4 }
/^test result:/ && !is_again { gsub(/[^0-9 ]/, ""); passed += $1; failed += $2; ignored += $3 }
END { printf "%d %d %d\n", passed, failed, ignored }
