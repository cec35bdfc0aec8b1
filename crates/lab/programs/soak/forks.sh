# Forks subshells, pipelines and programs, which verify a variable of the shell.
# Runs while the file named by its argument exists.
held=$(head -c 2000000 /dev/zero | tr '\0' m)
echo ready
while [ -e "$1" ]; do
    length=$(echo "${#held}")
    counted=$(echo "$held" | tr -d '\n' | wc -c)
    if [ "$length" -ne 2000000 ] || [ "$counted" -ne 2000000 ]; then
        echo "WRONG RESULT: $length and $counted of 2000000" >&2
        exit 3
    fi
    (exit 7)
    [ $? -eq 7 ] || exit 3
    sleep 0.05
done
