"""What people see: tables, charts and reports."""
