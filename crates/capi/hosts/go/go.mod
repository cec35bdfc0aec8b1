module host

go 1.20
