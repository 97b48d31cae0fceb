# First lines of the paragraphs of doc comments that name no subject, and comments of one word.
FNR == 1 { previous = starts = code = 0 }
{
    is_doc = $0 ~ /^[[:space:]]*\/\/[\/!]/
    text = $0; sub(/^[[:space:]]*\/\/[\/!] ?/, "", text)
    if (!is_doc) { previous = starts = code = 0; next }
    if (text ~ /^```/) code = !code
    is_first = !previous
    if (!code && (is_first || starts) &&
        (text ~ /^(Its|It|They|Their|Those|That|These|He|She) / || is_first && text ~ /^[^ ]+$/)) print FILENAME ":" FNR ": " text
    starts = text == ""
    previous = 1
}
