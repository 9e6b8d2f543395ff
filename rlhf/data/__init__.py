"""Text, demonstrations, comparisons and prompts: read from files, validated as records, made into tokens."""
