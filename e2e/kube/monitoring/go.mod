module sluice.dev/e2e/monitoring

go 1.26.0
