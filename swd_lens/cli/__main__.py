from swd_lens.cli import main

main()
