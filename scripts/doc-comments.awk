# First lines of doc blocks that name no subject, or are one word.
FNR == 1 { previous = 0 }
{
    is_doc = $0 ~ /^[[:space:]]*\/\/[\/!]/
    if (is_doc && !previous) {
        text = $0; sub(/^[[:space:]]*\/\/[\/!] ?/, "", text)
        if (text ~ /^(Its|It|They|Their|Those|That|These) / || text ~ /^[^ ]+$/) print FILENAME ":" FNR ": " text
    }
    previous = is_doc
}
