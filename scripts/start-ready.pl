#!/usr/bin/env perl
# Starts a daemon in its own session and returns when it has sent READY=1 (the sd_notify protocol). Fails if the daemon
# exits first or stays silent. perl-base is part of every Debian; systemd is not needed.
# usage: start-ready.pl SOCKET LOG PIDFILE SECONDS COMMAND ARGUMENT…
# PIDFILE gets "pid start-time": the kernel may reuse a pid.
use strict;
use warnings;
use IO::Socket::UNIX;
use POSIX qw(setsid WNOHANG);
use Socket;

my ($socket, $log, $pidfile, $seconds, @command) = @ARGV;
die "usage: start-ready.pl SOCKET LOG PIDFILE SECONDS COMMAND ARGUMENT…\n" unless @command;
unlink $socket;
my $notify = IO::Socket::UNIX->new(Type => SOCK_DGRAM, Local => $socket)
    or die "start-ready: cannot bind $socket: $!\n";

my $pid = fork // die "start-ready: cannot fork: $!\n";
if ($pid == 0) {
    setsid();
    POSIX::close($_) for 3 .. 63;
    open(STDIN, '<', '/dev/null');
    open(STDOUT, '>>', $log) or die "start-ready: cannot open $log: $!\n";
    open(STDERR, '>&', \*STDOUT);
    $ENV{NOTIFY_SOCKET} = $socket;
    exec { $command[0] } @command or do {
        print STDERR "start-ready: cannot run $command[0]: $!\n";
        POSIX::_exit(127);
    };
}

sub start_time {
    open(my $stat, '<', "/proc/$_[0]/stat") or return '';
    my $fields = <$stat> =~ s/^.*\)\s+//sr;
    return (split ' ', $fields)[19];    # field 22 of proc(5)'s stat, counted after the command's name
}
open(my $record, '>', "$pidfile.partial") or die "start-ready: cannot write $pidfile: $!\n";
print $record "$pid ", start_time($pid), "\n";
close $record;
rename "$pidfile.partial", $pidfile;

local $SIG{CHLD} = sub { };    # so that SIGCHLD interrupts select
my $deadline = time + $seconds;
while (1) {
    my $failure;
    if (waitpid($pid, WNOHANG) == $pid) {
        $failure = $? & 127 ? 'was killed by signal ' . ($? & 127) : 'exited with status ' . ($? >> 8);
    } elsif (time >= $deadline) {
        $failure = "was not ready after $seconds s";
    }
    if (defined $failure) {
        unlink $socket;
        print STDERR "start-ready: $command[0] $failure; the end of $log:\n";
        # To the same stream as the message above, so that both arrive together.
        open STDOUT, '>&', \*STDERR;
        system 'tail', '-n', '20', $log;
        exit 1;
    }
    my $set = '';
    vec($set, fileno $notify, 1) = 1;
    next unless select($set, undef, undef, 1) > 0;
    recv($notify, my $message, 4096, 0);
    last if $message =~ /^READY=1$/m;
}
unlink $socket;
