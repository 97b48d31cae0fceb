# Prints the table cells of Markdown files that have more than `max` words (25): FILE:LINE: WORDS words: CELL.
# Fenced code and the parts between <!-- made by … --> and <!-- to here --> are left out.
BEGIN { if (!max) max = 25 }
FNR == 1 { fenced = generated = 0 }
/^ *```/ { fenced = !fenced }
/^<!-- made by / { generated = 1 }
/^<!-- to here -->/ { generated = 0 }
fenced || generated || !/^\|/ { next }
{
    gsub(/\\\|/, "\001")
    cells = split($0, cell, "|")
    for (i = 2; i < cells; i++) {
        words = split(cell[i], word, " ")
        if (words > max) {
            gsub("\001", "|", cell[i])
            printf "%s:%d: %d words:%s\n", FILENAME, FNR, words, cell[i]
        }
    }
}
