"""Studies of what units do: audit/, edit/, graph/, qk/, interactions/. Each is a namespace of the package's top."""
