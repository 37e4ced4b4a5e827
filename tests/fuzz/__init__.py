"""Fuzzing of everything that the package writes and reads again: damaged files, kills, several processes, bad disks.

    python -m tests.fuzz --cases 30000 --kills 200 --rounds 500 --disks 200 --seed 0

1. cases.py: a thing on disk is damaged (damages.py) and read; it ends in the original numbers or in its documented error.
2. kills.py: SIGKILL at a random moment of every resumable call and every save (calls.py); then the same bits.
3. writers.py: 2, 3 and 5 processes at one folder; nobody sees half of anything, nothing is lost.
4. disks.py: full, read-only and impossible places, and such without locks; an OSError that names the path, before any work where
   that can be known.

Every trial is a number below a seed and can be replayed alone (`--replay case/17`). The state is a JSON file: the same command
goes on where it was stopped, and it lists the faults. At the end stands a table:

    class | tried | original | documented error | other values | silent | other exception | hang | lost

"other values" are no fault: of files whose hashes were made again with the package's own code, of files that users write, and
where all that counts is from another set.
The four columns after it are faults; the command ends with 1 where there is one.
"""
