"""Results of commands for other programs: SARIF, JUnit XML, and annotations of GitHub Actions."""
