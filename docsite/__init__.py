"""The documentation as a site: what MkDocs needs beside docs/ and mkdocs.yml."""
