# shellcheck shell=bash disable=SC2164 # The prelude ends the script at an error.
git config --global user.name n
git config --global user.email n@localhost
git config --global init.defaultBranch main
git init -q origin
cd origin
for n in $(seq 5); do
    for file in $(seq 20); do echo "$n $file" >"file$file"; done
    git add . && git commit -q -m "commit $n" --date "2024-01-0${n}T00:00:00Z"
done
git checkout -q -b side HEAD~2 && echo side >side && git add side && git commit -q -m side
git checkout -q main && git merge -q -m merge side
git gc -q && git fsck 2>&1 | grep -v dangling || :
cd ..
git clone -q origin clone
cd clone
git log --oneline | wc -l
git ls-files | wc -l
echo changed >>file1 && git stash -q && git stash pop -q && git diff --stat | tail -n 1
git worktree add -q ../tree HEAD && cat ../tree/side
