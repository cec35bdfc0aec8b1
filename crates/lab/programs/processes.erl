#!/usr/bin/env escript
%% Three processes that each hold a map of binaries and lists, and hash it again and again.
-mode(compile).

main([Text]) ->
    Count = list_to_integer(Text),
    Parent = self(),
    Workers = [spawn_link(fun() -> Parent ! {self(), work(Count, Number)} end) || Number <- [1, 2, 3]],
    Sums = [receive {Worker, Sum} -> Sum end || Worker <- Workers],
    io:format("~p~n", [Sums]).

work(Count, Number) ->
    Map = maps:from_list([{Key, {integer_to_list(Key * 7919), Key rem 997, [Key, Number]}}
                          || Key <- lists:seq(1, Count)]),
    First = digest(Map, Count),
    First = digest(Map, Count),
    First = digest(Map, Count),
    First.

digest(Map, Count) ->
    lists:foldl(fun(Key, Sum) ->
        {Text, Rest, [One | _]} = maps:get(Key, Map),
        (Sum * 31 + length(Text) + Rest + One) rem 1000000007
    end, 0, lists:seq(1, Count)).
